"""The CRDs: structural, up to date, with the columns and names people type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from ruamel.yaml import YAML

import crdcheck
from modelpool_api import schema
from modelpool_api.meta import ApiModel, Node

KINDS = [resource.kind for resource in schema.RESOURCES]


def made(kind: str) -> dict[str, Any]:
    """Return the CRD of *kind*."""
    return schema.crd(next(r for r in schema.RESOURCES if r.kind == kind))


def spec_of(kind: str) -> dict[str, Any]:
    """Return the schema of the spec of *kind*."""
    version = made(kind)["spec"]["versions"][0]
    spec: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_the_api_server_takes_the_schema(kind: str) -> None:
    assert crdcheck.structural_errors(made(kind)) == []


def test_the_structural_checker_refuses_what_an_api_server_refuses() -> None:
    crd = made("ModelPool")
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = root["properties"]["spec"]["properties"]
    spec["a"] = {"$ref": "#/definitions/x"}
    spec["b"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    spec["c"] = {"type": "object", "properties": {}, "additionalProperties": False}
    spec["d"] = {"type": "array", "items": {"type": "string", "maxLength": 1}}
    spec["e"] = {"type": "string"}
    spec["f"] = {"type": "integer", "maximum": 3, "default": 4}
    spec["g"] = {"type": "string", "title": "G", "maxLength": 1}
    spec["h"] = {
        "type": "array",
        "maxItems": 1,
        "items": {"type": "object", "properties": {"n": {"type": "string", "maxLength": 1}}},
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["n"],
    }
    root["properties"]["spec"]["x-kubernetes-validations"] = [
        {"rule": "true", "message": "x", "fieldPath": ".nowhere"}
    ]
    crd["spec"]["versions"][0]["additionalPrinterColumns"][0]["jsonPath"] = ".spec.nothing"

    errors = "\n".join(crdcheck.structural_errors(crd))

    for part in (
        "spec.a: $ref is forbidden",
        "spec.b: anyOf is only for int-or-string",
        "spec.c: properties and additionalProperties exclude",
        "spec.d: no maxItems",
        "spec.d: no list type",
        "spec.e: no maxLength",
        "spec.f: default:",
        "spec.g: title is forbidden",
        "spec.h: list key n is neither required nor defaulted",
        "fieldPath .nowhere is no field",
        "column Policy: no field .spec.nothing",
    ):
        assert part in errors


def test_the_files_in_git_are_made_from_the_models() -> None:
    assert schema.drift(schema.folder()) == ""


def test_drift_is_found_in_both_directions(tmp_path: Path) -> None:
    schema.write(tmp_path)
    assert schema.main(["--check", "--folder", str(tmp_path)]) == 0

    pools = tmp_path / "modelpool.dev_modelpools.yaml"
    pools.write_text(pools.read_text("utf-8").replace("mpool", "pool"), "utf-8")
    (tmp_path / "modelpool.dev_olds.yaml").write_text("a: b\n", "utf-8")

    assert schema.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "+        - mpool" in schema.drift(tmp_path).replace("      - mpool", "        - mpool")
    assert "modelpool.dev_olds.yaml (in git)" in schema.drift(tmp_path)
    schema.main(["--write", "--folder", str(tmp_path)])
    assert schema.drift(tmp_path) == ""
    assert not (tmp_path / "modelpool.dev_olds.yaml").exists()


def test_the_yaml_says_what_the_schema_says() -> None:
    for resource in schema.RESOURCES:
        text = schema.files()[f"modelpool.dev_{resource.plural}.yaml"]

        assert YAML(typ="safe", pure=True).load(text) == schema.crd(resource)


@pytest.mark.parametrize(
    "value", ["yes", "no", "1e3", "0s", "~", "null", "a: b", "- x", "#x", "é", "a\nb"]
)
def test_yaml_keeps_strings_strings(value: str) -> None:
    assert YAML(typ="safe", pure=True).load(schema.to_yaml({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    ("kind", "short", "usual", "wide"),
    [
        (
            "ModelPool",
            "mpool",
            ["Policy", "Resident", "Phase", "Age"],
            ["Pending", "Held", "LastSwap"],
        ),
        (
            "InferenceService",
            "isvc",
            ["Phase", "Ready", "Pool", "Age"],
            ["Endpoint", "Image"],
        ),
        ("ModelRouter", "mrouter", ["Phase", "Endpoint", "Age"], ["Replicas"]),
        (
            "ModelDeployment",
            "mdep",
            ["Roles", "Replacing", "Phase", "Age"],
            ["Model", "Suspended", "Endpoint"],
        ),
        ("InstanceType", "itype", ["Queue", "Card", "Cards", "Age"], ["CPU", "Memory"]),
    ],
)
def test_kubectl_get_shows_what_people_look_for(
    kind: str, short: str, usual: list[str], wide: list[str]
) -> None:
    crd = made(kind)
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]

    assert crd["spec"]["names"]["shortNames"] == [short]
    assert [c["name"] for c in columns if not c.get("priority")] == usual
    assert [c["name"] for c in columns if c.get("priority")] == wide


def test_scopes_and_subresources() -> None:
    assert made("InstanceType")["spec"]["scope"] == "Cluster"
    assert made("ModelPool")["spec"]["scope"] == "Namespaced"
    for kind in KINDS:
        subresources = made(kind)["spec"]["versions"][0]["subresources"]
        assert subresources["status"] == {}
        assert ("scale" in subresources) == (kind == "InferenceService")


def test_every_field_is_explained() -> None:
    def bare(node: dict[str, Any], where: str) -> list[str]:
        found = []
        for name, prop in node.get("properties", {}).items():
            if "description" not in prop and name not in ("apiVersion", "kind", "metadata"):
                found.append(f"{where}.{name}")
            found += bare(prop, f"{where}.{name}")
        return found + (bare(node["items"], where) if "items" in node else [])

    for kind in KINDS:
        root = made(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert bare(root, kind) == []


def test_defaults_are_filled_in_by_the_server() -> None:
    pool = {"members": [{"deploymentRef": {"name": "coder"}}]}
    stored, errors = crdcheck.Admission(made("ModelPool")).admit(
        {"metadata": {"name": "gpu0"}, "spec": pool}
    )

    assert errors == []
    assert stored["spec"] == {
        "members": [{"deploymentRef": {"name": "coder"}}],
        "swapPolicy": "sticky",
        "swapBudget": "300s",
        "maxTurn": "60s",
        "linger": "auto",
        "loadTimeout": "10m",
        "hungAfter": "60s",
        "gpu": 1,
    }


def test_quantities_are_numbers_or_strings() -> None:
    limit = spec_of("InferenceService")["properties"]["resources"]["properties"]["limits"]

    assert limit["additionalProperties"]["x-kubernetes-int-or-string"] is True
    assert "type" not in limit["additionalProperties"]


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (int | str, "union of 2 types"),
        (tuple[int, str], "fixed length"),
        (dict[int, str], "keys of maps"),
        (float, "float cannot be expressed"),
        (list[int], "cannot be expressed"),
    ],
)
def test_a_type_that_cannot_be_expressed_is_refused_by_name(annotation: Any, says: str) -> None:
    with pytest.raises(schema.NotStructural, match="Here.field") as caught:
        schema.type_schema(annotation, where="Here.field")

    assert says in str(caught.value)


def test_types_that_can_be_expressed() -> None:
    class Inner(ApiModel):
        """Inner."""

        some_name: bool = True

    def of(annotation: Any) -> dict[str, Any]:
        return schema.type_schema(annotation, where="x")

    assert of(Literal["a"]) == {"type": "string", "enum": ["a"]}
    assert of(Annotated[str | None, Node({"maxLength": 3})]) == {"type": "string", "maxLength": 3}
    assert of(dict[str, int])["additionalProperties"] == {"type": "integer"}
    assert of(Inner)["properties"] == {"someName": {"type": "boolean", "default": True}}


def test_no_category_is_the_name_of_a_kind() -> None:
    # `kubectl get modelpool NAME` would list the category and refuse the name.
    names = [made(kind)["spec"]["names"] for kind in KINDS]
    taken = {each[key] for each in names for key in ("singular", "plural")}
    taken |= {short for each in names for short in each["shortNames"]}

    assert not taken & {category for each in names for category in each["categories"]}

"""
From the models to CustomResourceDefinitions, and the check that the files in git are theirs.

    python -m modelpool_api.schema --write    writes manifests/crds/*.yaml
    python -m modelpool_api.schema --check    exit code 1 and a diff when they are out of date

The API server takes *structural* schemas only: no references, no unions, types everywhere. The
models are walked type by type, and a type that cannot be expressed is an error here rather than
at the first `kubectl apply`.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .meta import ApiModel, Node, ObjectMeta, Rule
from .names import GROUP, VERSION
from .v1alpha1 import (
    InferenceService,
    InstanceType,
    ModelDeployment,
    ModelPool,
    ModelRouter,
)
from .v1alpha1.inferenceservice import SERVICE_NAME_FITS
from .v1alpha1.modeldeployment import MEMBER_NAMES_FIT, NAME_FITS, SERVICE_NAMES_FIT
from .v1alpha1.modelpool import POOL_NAME_FITS
from .v1alpha1.modelrouter import ROUTER_NAME_FITS

Schema = dict[str, Any]


class NotStructural(Exception):
    """A model uses a type that a structural schema cannot express."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    description: str = ""

    def definition(self) -> Schema:
        """Return it as the CRD has it."""
        column: Schema = {"name": self.name, "type": self.type, "jsonPath": self.path}
        if self.description:
            column["description"] = self.description
        if self.wide:
            column["priority"] = 1
        return column


AGE = Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True, slots=True)
class Resource:
    """What a CRD says beside the schema."""

    model: type[ApiModel]
    plural: str
    short: str
    columns: tuple[Column, ...]
    namespaced: bool = True
    scale: Mapping[str, str] | None = None
    rules: tuple[Rule, ...] = field(default=())
    """On the object as a whole, where `metadata.name` can be seen."""

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return self.model.__name__


RESOURCES = (
    Resource(
        ModelPool,
        "modelpools",
        "mpool",
        (
            Column("Policy", ".spec.swapPolicy"),
            Column("Resident", ".status.residentMember", description="Member that holds the slot"),
            Column("Phase", ".status.phase"),
            Column(
                "Pending", ".status.pendingMember", wide=True, description="Member that is next"
            ),
            Column("Held", ".status.held", "integer", wide=True, description="Waiting requests"),
            Column("LastSwap", ".status.lastSwapTime", "date", wide=True),
            AGE,
        ),
        rules=(POOL_NAME_FITS,),
    ),
    Resource(
        InferenceService,
        "inferenceservices",
        "isvc",
        (
            Column("Phase", ".status.phase"),
            Column("Ready", ".status.readyReplicas", "integer"),
            Column("Pool", ".status.pool"),
            Column("Endpoint", ".status.endpoint", wide=True),
            Column("Image", ".spec.image", wide=True),
            AGE,
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
        rules=(SERVICE_NAME_FITS,),
    ),
    Resource(
        ModelRouter,
        "modelrouters",
        "mrouter",
        (
            Column("Phase", ".status.phase"),
            Column("Endpoint", ".status.endpoint"),
            Column("Replicas", ".status.replicas", "integer", wide=True),
            AGE,
        ),
        rules=(ROUTER_NAME_FITS,),
    ),
    Resource(
        ModelDeployment,
        "modeldeployments",
        "mdep",
        (
            Column("Model", ".spec.model.name", wide=True),
            Column("Roles", ".status.roleSummary", description="Ready/desired replicas of each"),
            Column("Replacing", ".status.replacing", description="Replicas being replaced"),
            Column("Phase", ".status.phase"),
            Column("Suspended", ".spec.suspend", "boolean", wide=True),
            Column("Endpoint", ".status.endpoint", wide=True),
            AGE,
        ),
        rules=(NAME_FITS, SERVICE_NAMES_FIT, MEMBER_NAMES_FIT),
    ),
    Resource(
        InstanceType,
        "instancetypes",
        "itype",
        (
            Column("Queue", ".spec.queueName"),
            Column("Card", ".spec.accelerator.card"),
            Column("Cards", ".spec.capacity.cards", "integer"),
            Column("CPU", ".spec.perCard.cpu", wide=True),
            Column("Memory", ".spec.perCard.memory", wide=True),
            AGE,
        ),
        namespaced=False,
    ),
)


def crd(resource: Resource) -> Schema:
    """Return the CustomResourceDefinition of *resource*."""
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root_schema(resource)},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.definition() for column in resource.columns],
    }
    if resource.scale is not None:
        version["subresources"]["scale"] = dict(resource.scale)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/part-of": "modelpool"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": [resource.short],
                # Not the name of a kind: kubectl would take `get modelpool NAME` for the category.
                "categories": ["modelpool-all"],
            },
            "versions": [version],
        },
    }


def root_schema(resource: Resource) -> Schema:
    """Return the schema of an object of *resource*."""
    schema = model_schema(resource.model)
    schema["properties"]["apiVersion"] = {"type": "string"}
    schema["properties"]["kind"] = {"type": "string"}
    _add_rules(schema, resource.rules)
    return schema


def model_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of one model, everything inlined."""
    hints = get_type_hints(model, include_extras=True)
    properties: Schema = {}
    required = []
    for name, info in model.model_fields.items():
        key = info.alias or name
        if hints[name] is ObjectMeta:
            properties[key] = {"type": "object"}
            continue
        prop = type_schema(hints[name], where=f"{model.__name__}.{name}")
        if info.description:
            # Of the field, not of its type: it says what the value is for here.
            prop = {**prop, "description": _one_paragraph(info.description)}
        if info.is_required():
            required.append(key)
        else:
            default = _default(info)
            if default is not None:
                prop["default"] = default
        properties[key] = prop
    schema: Schema = {"type": "object"}
    if model.__doc__:
        schema["description"] = _one_paragraph(inspect.cleandoc(model.__doc__))
    schema["properties"] = properties
    if required:
        schema["required"] = required
    _add_rules(schema, getattr(model, "rules", ()))
    return schema


def type_schema(annotation: Any, *, where: str) -> Schema:
    """
    Return the schema of one type.

    Raises:
        NotStructural: it cannot be expressed; *where* is named.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *markers = get_args(annotation)
        return _with_markers(type_schema(inner, where=where), markers)
    if origin in (Union, types.UnionType):
        options = [arg for arg in get_args(annotation) if arg is not type(None)]
        if len(options) != 1:
            raise NotStructural(f"{where}: a union of {len(options)} types cannot be expressed")
        return type_schema(options[0], where=where)
    if origin is Literal:
        return {"type": "string", "enum": list(get_args(annotation))}
    if origin is tuple:
        item, *rest = get_args(annotation)
        if rest != [Ellipsis]:
            raise NotStructural(f"{where}: a tuple of fixed length cannot be expressed")
        return {"type": "array", "items": type_schema(item, where=f"{where}[]")}
    if origin is dict:
        key, value = get_args(annotation)
        if key is not str:
            raise NotStructural(f"{where}: keys of maps are strings")
        if value is Any:
            return {"type": "object"}
        return {"type": "object", "additionalProperties": type_schema(value, where=f"{where}{{}}")}
    if not isinstance(annotation, type):
        raise NotStructural(f"{where}: {annotation!r} cannot be expressed")
    if issubclass(annotation, BaseModel):
        return model_schema(annotation)
    if issubclass(annotation, Enum):
        return {"type": "string", "enum": [member.value for member in annotation]}
    if annotation is bool:
        return {"type": "boolean"}
    if annotation is int:
        return {"type": "integer"}
    if annotation is str:
        return {"type": "string"}
    raise NotStructural(f"{where}: {annotation.__name__} cannot be expressed")


def _with_markers(schema: Schema, markers: Iterable[object]) -> Schema:
    for marker in markers:
        match marker:
            case Node(schema=keys, rules=rules):
                schema = {**schema, **keys}
                _add_rules(schema, rules)
            case FieldInfo():
                schema = _with_markers(schema, marker.metadata)
            case annotated_types.Ge(ge=least):
                schema = {**schema, "minimum": least}
            case annotated_types.Le(le=most):
                schema = {**schema, "maximum": most}
            case _:
                pass  # validators of the Python side
    if schema.get("x-kubernetes-int-or-string"):
        # The one union that there is; it replaces the type.
        for key in ("type", "maxLength"):
            schema.pop(key, None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return schema


def _add_rules(schema: Schema, rules: Iterable[Rule]) -> None:
    for rule in rules:
        entry: Schema = {"rule": rule.rule, "message": rule.message}
        if rule.shown:
            entry["messageExpression"] = rule.shown
        if rule.at:
            entry["fieldPath"] = rule.at
        schema.setdefault("x-kubernetes-validations", []).append(entry)


def _default(info: FieldInfo) -> Any:
    """
    Return the default as the API server is to fill it in, or None to leave the field out.

    What is empty is left out: stored objects stay as short as people wrote them.
    """
    value = info.get_default(call_default_factory=True, validated_data={})
    match value:
        case Enum():
            return value.value
        case bool() | int():
            return value
        case str() if value:
            return value
        case _:
            return None


def _one_paragraph(docstring: str) -> str:
    """Return *docstring* without line breaks inside paragraphs, for `kubectl explain`."""
    paragraphs = re.split(r"\n\s*\n", docstring.strip())
    return "\n\n".join(re.sub(r"\s+", " ", paragraph) for paragraph in paragraphs)


def to_yaml(value: Any) -> str:
    """
    Return *value* as YAML, the same on every machine and for every version of every library.

    Strings are written as JSON, which YAML reads as they are meant.
    """
    return "\n".join(_lines(value, 0)) + "\n"


def _lines(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            name = key if re.fullmatch(r"[A-Za-z][A-Za-z0-9/._-]*", key) else json.dumps(key)
            if isinstance(item, dict | list) and item:
                lines.append(f"{pad}{name}:")
                lines.extend(_lines(item, depth + 1))
            else:
                lines.append(f"{pad}{name}: {_scalar(item)}")
        return lines
    lines = []
    for item in value:
        if isinstance(item, dict) and item:
            first, *rest = _lines(item, depth + 1)
            lines.append(f"{pad}- {first.strip()}")
            lines.extend(rest)
        else:
            lines.append(f"{pad}- {_scalar(item)}")
    return lines


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*( [A-Za-z0-9._/-]+)*")
_NOT_STRINGS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS:
        return value
    return json.dumps(value, ensure_ascii=False)


HEAD = "# Made by `python -m modelpool_api.schema --write`; edit operator/modelpool_api instead.\n"


def files() -> dict[str, str]:
    """Return the text of every file, by name."""
    return {
        f"{GROUP}_{resource.plural}.yaml": HEAD + to_yaml(crd(resource)) for resource in RESOURCES
    }


def folder() -> Path:
    """Return where the files are in a checkout."""
    return Path(__file__).parent.parent.parent / "manifests" / "crds"


def drift(where: Path) -> str:
    """Return what would change in *where* as a diff; empty when it is up to date."""
    wanted = files()
    found = {path.name: path.read_text("utf-8") for path in sorted(where.glob(f"{GROUP}_*.yaml"))}
    lines: list[str] = []
    for name in sorted(wanted | found):
        lines += difflib.unified_diff(
            found.get(name, "").splitlines(keepends=True),
            wanted.get(name, "").splitlines(keepends=True),
            f"{name} (in git)",
            f"{name} (made from the models)",
        )
    return "".join(lines)


def write(where: Path) -> None:
    """Write the files into *where* and remove those of kinds that are gone."""
    where.mkdir(parents=True, exist_ok=True)
    wanted = files()
    for path in where.glob(f"{GROUP}_*.yaml"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (where / name).write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m modelpool_api.schema", description="CRDs from the API types."
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the files")
    mode.add_argument("--check", action="store_true", help="compare them, exit code 1 on drift")
    parser.add_argument("--folder", type=Path, default=folder(), help="where they are")
    options = parser.parse_args(arguments)
    if options.write:
        write(options.folder)
        return 0
    difference = drift(options.folder)
    if difference:
        sys.stdout.write(difference)
        sys.stderr.write(
            f"{options.folder} is out of date; run python -m modelpool_api.schema --write\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What Prometheus and its operator read, and network policies: valid, and about what exists."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from manifestfiles import MANIFESTS, ROOT, documents, objects, one, rendered
from modelpool_api.v1alpha1 import InferenceService
from modelpool_kube.kinds import INFERENCE_SERVICES, Json
from modelpool_operator.plan import inferenceservice
from modelpool_operator.plan.model import Owner

SCHEMAS: Json = json.loads(
    (Path(__file__).parent / "schemas" / "monitoring.coreos.com_v1.json").read_text("utf-8")
)
MONITORING = objects("monitoring")


def strict(schema: Any) -> Any:
    """Return *schema* without room for fields that it does not know, as `kubectl` is by default."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(each) for key, each in schema.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def wrong(obj: Json) -> list[str]:
    """Return what the schema of its kind has against *obj*."""
    schema = copy.deepcopy(SCHEMAS[obj["kind"]])
    # Metadata is the API server's own and has no fields in a CRD.
    schema["properties"]["metadata"] = {"x-kubernetes-preserve-unknown-fields": True}
    validator = jsonschema.Draft202012Validator(strict(schema))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(obj)]


def service_template() -> Json:
    """Return the template of the Pods of an InferenceService."""
    service = InferenceService.model_validate(
        {"metadata": {"name": "coder", "namespace": "lab"}, "spec": {"image": "engine:1"}}
    )
    owner = Owner(INFERENCE_SERVICES, "coder", "lab", "u")
    made: Json = inferenceservice.deployment(service, owner)["spec"]["template"]
    return made


def selects(selector: Json, template: Json) -> bool:
    """Whether Pods of *template* are selected."""
    assert set(selector) == {"matchLabels"}
    chosen: bool = selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    return chosen


def port_names(template: Json) -> set[str]:
    """Return the names of the ports of the Pods of *template*."""
    return {
        port["name"] for each in template["spec"]["containers"] for port in each.get("ports", [])
    }


def router_template() -> Json:
    """Return the template of the Pods of a router."""
    made: Json = rendered()["Deployment"]["spec"]["template"]
    return made


def operator_template() -> Json:
    """Return the template of the Pods of the operator."""
    made: Json = one("operator", "Deployment")["spec"]["template"]
    return made


# Monitors and rules


@pytest.mark.parametrize("obj", MONITORING, ids=lambda each: each["metadata"]["name"])
def test_given_an_object_for_prometheus_then_its_operator_would_take_it(obj: Json) -> None:
    assert obj["apiVersion"] == "monitoring.coreos.com/v1"
    assert wrong(obj) == []


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("PodMonitor", lambda s: s.update(podMetricEndpoints=[]), "podMetricEndpoints"),
        ("PodMonitor", lambda s: s.pop("selector"), "selector"),
        ("PodMonitor", lambda s: s["podMetricsEndpoints"][0].update(interval="15"), "15"),
        ("PodMonitor", lambda s: s["podMetricsEndpoints"][0].update(targetPort=[]), "targetPort"),
        ("PodMonitor", lambda s: s["podMetricsEndpoints"][0].update(honourLabels=True), "honour"),
        ("PodMonitor", lambda s: s["selector"].update(matchLabel={}), "matchLabel"),
        ("PrometheusRule", lambda s: s["groups"][0].pop("name"), "name"),
        ("PrometheusRule", lambda s: s["groups"][0]["rules"][0].pop("expr"), "expr"),
        ("PrometheusRule", lambda s: s["groups"][0]["rules"][0].update({"for": "soon"}), "soon"),
        ("PrometheusRule", lambda s: s["groups"][0]["rules"][0].update(label={}), "label"),
    ],
)
def test_given_a_mistake_then_the_schema_finds_it(kind: str, change: Any, says: str) -> None:
    obj = copy.deepcopy(next(each for each in MONITORING if each["kind"] == kind))
    change(obj["spec"])

    found = wrong(obj)

    assert len(found) == 1
    assert says in found[0]


def test_given_the_rules_then_every_number_in_them_exists() -> None:
    known = set(re.findall(r"`(modelpool_[a-z_]+)`", (ROOT / "docs/metrics.md").read_text("utf-8")))
    known.add("modelpool_operator_leads")
    rules_of = one("monitoring", "PrometheusRule")["spec"]["groups"][0]["rules"]

    for rule in rules_of:
        used = set(re.findall(r"modelpool_[a-z_]+", rule["expr"]))
        assert used and used <= known
        assert rule["annotations"]["summary"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there")
@pytest.mark.parametrize("broken", [False, True], ids=["as they are", "with a mistake"])
def test_given_promtool_then_it_takes_the_rules_and_no_mistake(
    broken: bool, tmp_path: Path
) -> None:
    spec = copy.deepcopy(one("monitoring", "PrometheusRule")["spec"])
    if broken:
        spec["groups"][0]["rules"][0]["expr"] += " >"
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(spec), "utf-8")

    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode != 0) is broken, done.stdout + done.stderr
    if not broken:
        assert f"SUCCESS: {len(spec['groups'][0]['rules'])} rules found" in done.stdout


def test_given_the_monitors_then_they_select_our_pods_and_ports() -> None:
    templates = {
        "modelpool-routers": router_template(),
        "modelpool-operator": operator_template(),
        "": service_template(),
    }
    for name in ("modelpool-routers", "modelpool-operator"):
        monitor = one("monitoring", "PodMonitor", name)["spec"]
        chosen = [key for key, each in templates.items() if selects(monitor["selector"], each)]
        assert chosen == [name]
        ports = {each["port"] for each in monitor["podMetricsEndpoints"]}
        assert ports <= port_names(templates[name])


# Network policies


def test_given_the_policy_of_members_then_only_router_and_operator_reach_their_pods() -> None:
    spec = one("network", "NetworkPolicy", "modelpool-members")["spec"]
    peers = spec["ingress"][0]["from"]

    assert selects(spec["podSelector"], service_template())
    assert not selects(spec["podSelector"], router_template())
    assert not selects(spec["podSelector"], operator_template())
    assert len(spec["ingress"]) == 1
    # Routers live in the namespace of their pools, the operator in its own.
    router, operator = peers
    assert set(router) == {"podSelector"}
    assert selects(router["podSelector"], router_template())
    assert selects(operator["podSelector"], operator_template())
    namespace = one("operator", "Namespace")["metadata"]["name"]
    assert operator["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": namespace}
    }
    for peer in peers:
        assert not selects(peer["podSelector"], service_template())


def test_given_the_policy_of_routers_then_it_selects_them_and_names_their_ports() -> None:
    spec = one("network", "NetworkPolicy", "modelpool-routers")["spec"]
    ports = {port["port"] for each in spec["ingress"] for port in each["ports"]}

    assert selects(spec["podSelector"], router_template())
    assert not selects(spec["podSelector"], service_template())
    assert ports == {"http", "admin"}
    assert ports <= port_names(router_template())


def test_given_network_policies_then_every_one_of_them_is_looked_at() -> None:
    found = [each["metadata"]["name"] for each in documents(MANIFESTS / "network/policies.yaml")]

    assert sorted(found) == ["modelpool-members", "modelpool-routers"]

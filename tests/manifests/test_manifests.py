"""The manifests: valid, complete, no more rights than are used, and the chart says the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from crdcheck import Admission, evaluate
from manifestfiles import MANIFESTS, ROOT, documents, objects, one, rendered
from modelpool_api.v1alpha1 import ModelRouter
from modelpool_kube.kinds import MODEL_ROUTERS, Json
from modelpool_operator.plan.modelrouter import COMPONENT, rules
from modelpool_operator.plan.render import labels
from operatorworld import NS, OperatorWorld

CHART = MANIFESTS / "helm" / "modelpool"
OURS = "modelpool.dev/v1alpha1"
FOREIGN = {"monitoring.coreos.com/v1", "kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2"}
"""Kinds of others, whose schemas are not at hand."""


def all_files() -> list[Path]:
    """Return all manifests, kustomizations and the chart left out."""
    return sorted(
        path
        for path in MANIFESTS.rglob("*.yaml")
        if path.name != "kustomization.yaml" and "helm" not in path.parts
    )


@pytest.mark.parametrize("path", all_files(), ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_given_a_manifest_then_the_server_would_take_it(path: Path) -> None:
    crds = {
        each["spec"]["names"]["kind"]: each
        for crd in (MANIFESTS / "crds").glob("modelpool.dev_*.yaml")
        for each in documents(crd)
    }
    for obj in documents(path):
        if obj["apiVersion"] == OURS:
            _, wrong = Admission(crds[obj["kind"]]).admit(obj)
            assert wrong == []
        elif obj["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(obj, "1.32", strict=True)


@pytest.mark.parametrize(
    "path",
    sorted(MANIFESTS.rglob("kustomization.yaml")),
    ids=lambda path: str(path.parent.relative_to(MANIFESTS)),
)
def test_given_a_kustomization_then_all_it_names_exists_and_nothing_is_left_out(
    path: Path,
) -> None:
    named = documents(path)[0]["resources"]

    for each in named:
        assert (path.parent / each).exists()
    assert len(named) == len(set(named))
    if path.parent.name not in ("base", "samples"):
        beside = {each.name for each in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert beside == set(named)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not there")
@pytest.mark.parametrize(
    "folder",
    [
        *("base", "samples", "samples/modeldeployment", "samples/own-file"),
        *("monitoring", "network"),
    ],
)
def test_given_a_kustomization_then_kubectl_builds_it(folder: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS / folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    built = [each for each in yaml.safe_load_all(done.stdout) if each]
    expected = objects(folder)
    assert sorted((e["kind"], e["metadata"]["name"]) for e in built) == sorted(
        (e["kind"], e["metadata"]["name"]) for e in expected
    )


def test_given_what_the_operator_makes_then_the_server_would_take_it() -> None:
    for obj in rendered().values():
        if obj["kind"] == "Deployment":
            obj["spec"]["replicas"] = 1
        kubernetes_validate.validate(obj, "1.32", strict=True)


# Rights


def grants(role: Json) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of everything that *role* allows."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


VERBS = {"status": "patch"}


@pytest.mark.looptime(idle_timeout=100_000)
async def test_given_a_whole_life_then_every_request_of_the_operator_is_allowed() -> None:
    allowed = grants(one("operator", "ClusterRole"))
    world = OperatorWorld()
    world.member("coder", replicas=1)
    world.service("judge", replicas=1)
    refs: list[Any] = ["coder", {"inferenceServiceRef": {"name": "judge"}}]
    world.pool("gpu0", *refs, default="judge")
    spec = {"pools": [{"name": "gpu0"}], "allowAnonymous": True}
    world.cluster.put(MODEL_ROUTERS, NS, {"metadata": {"name": "front"}, "spec": spec})
    process = world.start()
    await world.run(300)
    from modelpool_kube.kinds import MODEL_POOLS

    world.cluster.remove(MODEL_POOLS, NS, "gpu0")
    await world.run(60)
    await world.close()

    used = set()
    for each in process.port.requests:
        resource = each.kind.plural + ("/status" if each.verb == "status" else "")
        used.add((each.kind.group, resource, VERBS.get(each.verb, each.verb)))
    assert used - allowed == set()
    assert {verb for _, _, verb in used} >= {"get", "list", "create", "patch", "delete"}


def test_given_the_rights_of_a_router_then_the_operator_may_grant_them() -> None:
    allowed = grants(one("operator", "ClusterRole"))
    listed = [
        {"modelDeploymentRef": {"name": "a"}},
        {"statefulSetRef": {"name": "b"}},
        {"deploymentRef": {"name": "c"}},
        {"inferenceServiceRef": {"name": "d"}},
    ]
    from modelpool_api.v1alpha1 import ModelPool

    pool = ModelPool.model_validate({"metadata": {"name": "gpu0"}, "spec": {"members": listed}})
    router = ModelRouter.model_validate(
        {"metadata": {"name": "r"}, "spec": {"pools": [{"name": "gpu0"}]}}
    )

    given = grants({"rules": list(rules(router, [pool]))})

    assert given - allowed == set()
    assert ("kueue.x-k8s.io", "workloads", "list") in given


def test_given_the_operators_role_then_it_is_no_wider_than_it_must_be() -> None:
    found = grants(one("operator", "ClusterRole"))

    assert not [each for each in found if "*" in each]
    assert not [each for each in found if each[1] in ("secrets", "nodes", "pods/exec")]
    assert not [
        each
        for each in found
        if each[2] in ("escalate", "bind", "impersonate", "update")
        and not each[1].endswith("/finalizers")
    ]


def test_given_watches_then_every_watched_kind_may_be_watched() -> None:
    from modelpool_operator.engine.watching import ALL, LABELLED

    allowed = grants(one("operator", "ClusterRole"))

    for kind in (*ALL, *LABELLED):
        for verb in ("list", "watch"):
            assert (kind.group, kind.plural, verb) in allowed


# The policy


def verdicts(user: str, new: Json, old: Json) -> list[str]:
    """Return the messages with which the policy refuses an update."""
    spec = one("policy", "ValidatingAdmissionPolicy")["spec"]
    names: dict[str, Any] = {
        "object": new,
        "oldObject": old,
        "request": {"userInfo": {"username": user}, "namespace": "lab"},
        "params": {"metadata": {"name": "front", "namespace": "lab"}},
    }
    if not all(evaluate(each["expression"], **names) for each in spec["matchConditions"]):
        return []
    variables = {}
    for each in spec["variables"]:
        value = evaluate(each["expression"], **names)
        variables[each["name"]] = (
            yaml.safe_load(str(value).lower()) if each["name"] == "isRouter" else _plain(value)
        )
    names["variables"] = variables
    return [
        each["message"] for each in spec["validations"] if not evaluate(each["expression"], **names)
    ]


def test_given_a_router_then_the_policy_knows_its_account() -> None:
    """By labels of the account: what a CRD describes is not known to an API server that starts."""
    assert one("policy", "ValidatingAdmissionPolicy")["spec"]["paramKind"] == {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
    }
    wanted = one("policy", "ValidatingAdmissionPolicyBinding")["spec"]["paramRef"]["selector"]

    assert wanted["matchLabels"].items() <= labels(COMPONENT, "front").items()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value)


MEMBER: Json = {
    "metadata": {"name": "coder", "annotations": {"a": "1"}, "labels": {"l": "1"}},
    "spec": {"replicas": 0, "template": {"spec": {"containers": [{"image": "x"}]}}},
}
ROUTER = "system:serviceaccount:lab:front"


def changed(**change: Any) -> Json:
    """Return a member with keys of spec or metadata replaced."""
    metadata = {**MEMBER["metadata"], **change.pop("metadata", {})}
    spec = {**MEMBER["spec"], **change.pop("spec", {})}
    return {"metadata": metadata, "spec": spec}


def test_given_a_router_then_it_may_scale_and_mark() -> None:
    mark = {"a": "1", "modelpool.dev/slot": "lab/modelpool-gpu0:3"}
    new = changed(spec={"replicas": 1}, metadata={"annotations": mark})

    assert verdicts(ROUTER, new, MEMBER) == []
    assert verdicts(ROUTER, MEMBER, new) == []
    assert verdicts(ROUTER, changed(spec={"suspend": True}), MEMBER) == []


@pytest.mark.parametrize(
    "new",
    [
        changed(spec={"template": {"spec": {"containers": [{"image": "evil"}]}}}),
        changed(spec={"paused": True}),
        {"metadata": MEMBER["metadata"], "spec": {"replicas": 0}},
        changed(metadata={"annotations": {"a": "2"}}),
        changed(metadata={"annotations": {}}),
        changed(metadata={"annotations": {"a": "1", "b": "1"}}),
        changed(metadata={"labels": {"l": "2"}}),
        changed(metadata={"finalizers": ["x/y"]}),
        changed(metadata={"ownerReferences": [{"uid": "1"}]}),
    ],
)
def test_given_a_router_then_it_may_change_nothing_else(new: Json) -> None:
    assert len(verdicts(ROUTER, new, MEMBER)) == 1
    for other in ("system:serviceaccount:lab:flux", "system:serviceaccount:x:front", "jane"):
        assert verdicts(other, new, MEMBER) == []


# The chart


def chart(values: Json, namespace: str) -> list[Json]:
    """Render the chart as Helm does; it uses nothing but names of values."""
    found = []
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = path.read_text("utf-8")

        def put(match: re.Match[str]) -> str:
            name = match[1]
            if name == ".Release.Namespace":
                return namespace
            assert name.startswith(".Values."), name
            return str(values[name.removeprefix(".Values.")])

        text = re.sub(r"\{\{ (\S+) \}\}", put, text)
        found += [each for each in yaml.safe_load_all(text) if each]
    return found


def by_name(found: list[Json]) -> list[tuple[str, str, Json]]:
    """Return objects in order of kind and name."""
    return sorted(
        ((each["kind"], each["metadata"]["name"], each) for each in found),
        key=lambda each: each[:2],
    )


def test_given_the_chart_then_it_renders_what_the_base_says() -> None:
    values = documents(CHART / "values.yaml")[0]

    from_chart = chart(values, "modelpool-system")
    crds = [each for path in (CHART / "crds").glob("modelpool*.yaml") for each in documents(path)]

    base = [each for each in objects("base") if each["kind"] != "Namespace"]
    assert by_name([*from_chart, *crds]) == by_name(base)


def test_given_other_values_then_they_arrive() -> None:
    found = chart({"image": "other:1", "replicas": 2}, "tools")

    deployment = next(each for each in found if each["kind"] == "Deployment")
    assert deployment["metadata"]["namespace"] == "tools"
    assert deployment["spec"]["replicas"] == 2
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "other:1"
    assert container["args"] == ["--router-image=other:1"]
    binding = next(each for each in found if each["kind"] == "ClusterRoleBinding")
    assert binding["subjects"][0]["namespace"] == "tools"


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not there")
def test_given_helm_then_it_agrees() -> None:
    # What it takes a cluster for differs between builds of it.
    where = ["-n", "modelpool-system", "--include-crds", "--kube-version", "1.32.0"]
    done = subprocess.run(
        ["helm", "template", "modelpool", str(CHART), *where],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    linted = subprocess.run(["helm", "lint", "--strict", str(CHART)], timeout=60, check=False)

    built = [each for each in yaml.safe_load_all(done.stdout) if each]
    base = [each for each in objects("base") if each["kind"] != "Namespace"]
    assert by_name(built) == by_name(base)
    assert linted.returncode == 0


# The image


def test_given_the_dockerfile_then_it_runs_as_nobody_and_has_both_programs() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    last = text.split("\nFROM ")[-1]

    assert re.search(r"^USER [1-9][0-9]*:[1-9][0-9]*$", last, re.M)
    assert "PYTHONSAFEPATH=1" in last
    assert '".[kubernetes]"' in text
    assert "latest" not in text
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for each in line.split():
            assert (ROOT / each).exists()
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for each in ("router", "operator", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        assert f"!{each}" in ignored


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not there")
def test_given_hadolint_then_it_agrees() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], timeout=60, check=False)

    assert done.returncode == 0


def test_given_the_versions_then_they_are_the_same_everywhere() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    image = one("operator", "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]

    assert image.endswith(f":{version}")
    assert documents(CHART / "Chart.yaml")[0]["appVersion"] == version
    assert documents(CHART / "values.yaml")[0]["image"] == image

"""Pod security: our own Pods are restricted, and those of the samples keep what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from crdcheck import Admission
from manifestfiles import objects, one, rendered
from modelpool_api import schema
from modelpool_api.v1alpha1 import InferenceService, InstanceType, ModelDeployment
from modelpool_kube.kinds import INFERENCE_SERVICES, Json
from modelpool_operator.plan import inferenceservice
from modelpool_operator.plan.model import Owner
from modelpool_operator.plan.modeldeployment.render import render
from podsecurity import BREACHES, baseline_breaches, restricted_breaches

ENFORCE = "pod-security.kubernetes.io/enforce"
CONFINED: Json = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
POD: Json = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "volumes": [{"name": "a", "emptyDir": {}}],
    "containers": [{"name": "a", "image": "a", "securityContext": CONFINED}],
}
"""A Pod that is fit for restricted."""


def stored(obj: Json) -> Json:
    """Return *obj* as the API server stores it."""
    resource = next(each for each in schema.RESOURCES if each.kind == obj["kind"])
    kept, wrong = Admission(schema.crd(resource)).admit(obj)
    assert wrong == []
    return kept


def service_pod(obj: Json) -> Json:
    """Return the Pod that an InferenceService becomes."""
    service = InferenceService.model_validate(stored(obj))
    owner = Owner(INFERENCE_SERVICES, service.metadata.name, "lab", "u")
    made: Json = inferenceservice.deployment(service, owner)["spec"]["template"]["spec"]
    return made


def sample_pods(folder: str) -> Iterator[tuple[str, Json]]:
    """Yield the Pods that the samples in *folder* become, with the name of what makes them."""
    found = objects(folder)
    types = {
        each["metadata"]["name"]: InstanceType.model_validate(stored(each))
        for each in found
        if each["kind"] == "InstanceType"
    }
    for each in found:
        name = each["metadata"]["name"]
        match each["kind"]:
            case "Deployment":
                yield name, each["spec"]["template"]["spec"]
            case "InferenceService":
                yield name, service_pod(each)
            case "ModelRouter":
                yield name, rendered()["Deployment"]["spec"]["template"]["spec"]
            case "ModelDeployment":
                deployment = ModelDeployment.model_validate(stored(each))
                for role in render(deployment, types).values():
                    for index in range(role.size):
                        yield f"{name}-{role.name}-{index}", role.pod(0, index)["spec"]
            case _:
                pass  # makes no Pods


def test_given_our_pods_then_they_are_allowed_where_pods_are_restricted() -> None:
    operator = one("operator", "Deployment")["spec"]["template"]["spec"]
    router = rendered()["Deployment"]["spec"]["template"]["spec"]

    assert list(restricted_breaches(operator)) == []
    assert list(restricted_breaches(router)) == []
    assert operator["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert one("operator", "Namespace")["metadata"]["labels"][ENFORCE] == "restricted"


@pytest.mark.parametrize(("folder", "least"), [("samples", 5), ("samples/modeldeployment", 5)])
def test_given_samples_then_their_namespace_lets_their_pods_in(folder: str, least: int) -> None:
    level = one(folder, "Namespace")["metadata"]["labels"][ENFORCE]
    found = {name: list(BREACHES[level](pod)) for name, pod in sample_pods(folder)}

    assert len(found) >= least
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_given_the_samples_of_pools_then_all_their_pods_are_fit_for_restricted() -> None:
    found = {name: list(restricted_breaches(pod)) for name, pod in sample_pods("samples")}

    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_given_samples_that_share_a_namespace_then_they_label_it_alike() -> None:
    pools, deployments = (one(each, "Namespace") for each in ("samples", "samples/modeldeployment"))

    assert pools["metadata"] == deployments["metadata"]


def test_given_no_user_then_a_service_is_fit_for_baseline_and_its_image_may_be_root() -> None:
    service = {
        "kind": "InferenceService",
        "metadata": {"name": "coder", "namespace": "lab"},
        "spec": {"image": "engine:1"},
    }
    pod = service_pod(service)

    assert list(baseline_breaches(pod)) == []
    assert set(restricted_breaches(pod)) == {"runAsNonRoot", "capabilities are kept"}


@pytest.mark.parametrize(
    ("change", "profile"),
    [
        ({"hostNetwork": True}, "baseline"),
        ({"hostPID": True}, "baseline"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "baseline"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "baseline"),
        ({"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}}, "baseline"),
        ({"containers": [{"securityContext": {"privileged": True}}]}, "baseline"),
        ({"containers": [{"ports": [{"hostPort": 80}]}]}, "baseline"),
        (
            {"containers": [{"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
            "baseline",
        ),
        ({"volumes": [{"name": "a", "nfs": {"server": "a", "path": "/"}}]}, "restricted"),
        ({"securityContext": {"runAsNonRoot": True}}, "restricted"),
        (
            {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}},
            "restricted",
        ),
        (
            {"securityContext": {**POD["securityContext"], "runAsUser": 0}},
            "restricted",
        ),
        ({"containers": [{"securityContext": {"capabilities": {"drop": ["ALL"]}}}]}, "restricted"),
        ({"containers": [{"securityContext": {"allowPrivilegeEscalation": False}}]}, "restricted"),
        (
            {
                "containers": [
                    {
                        "securityContext": {
                            **CONFINED,
                            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
                        }
                    }
                ]
            },
            "restricted",
        ),
        ({"initContainers": [{"securityContext": {"privileged": True}}]}, "baseline"),
    ],
)
def test_given_a_pod_that_breaks_a_profile_then_the_checker_says_so(
    change: dict[str, Any], profile: str
) -> None:
    pod = {**POD, **change}

    assert list(restricted_breaches(POD)) == []
    assert list(restricted_breaches(pod)) != []
    assert bool(list(baseline_breaches(pod))) is (profile == "baseline")

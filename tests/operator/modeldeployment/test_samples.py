"""The samples are taken by the API server's rules, and come up."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from crdcheck import Admission
from mdep_lab import Lab
from modelpool_kube.kinds import INSTANCE_TYPES, MODEL_DEPLOYMENTS, Json

ROOT = Path(__file__).parents[3]
WHERE = "demo"
FOLDER = ROOT / "manifests" / "samples" / "modeldeployment"
SAMPLES = [FOLDER / f"{name}.yaml" for name in ("multihost", "prefill-decode", "single")]


def load(path: Path) -> Json:
    """Return the object in *path*."""
    found: Json = YAML(typ="safe").load(path.read_text("utf-8"))
    return found


def admitted(obj: Json) -> Json:
    """Return *obj* as the API server stores it."""
    crd = load(ROOT / "manifests" / "crds" / f"modelpool.dev_{obj['kind'].lower()}s.yaml")
    stored, wrong = Admission(crd).admit(obj)
    assert wrong == []
    return stored


@pytest.mark.parametrize("path", SAMPLES, ids=[path.stem for path in SAMPLES])
async def test_a_sample_is_accepted_and_becomes_ready(path: Path) -> None:
    lab = Lab()
    lab.kueue.quota["gpu"] = {}
    kind = admitted(load(FOLDER / "instancetype.yaml"))
    lab.cluster.put(INSTANCE_TYPES, None, kind)
    sample = admitted(load(path))
    name = sample["metadata"]["name"]
    lab.cluster.put(MODEL_DEPLOYMENTS, WHERE, sample)

    for _ in range(5):
        await lab.operator.reconcile((WHERE, name))
        lab.move()

    status = lab.cluster.must(MODEL_DEPLOYMENTS, WHERE, name)["status"]
    assert status["phase"] == "Ready", status
    assert all(
        each["status"] == "True" for each in status["conditions"] if each["type"] != "Stalled"
    )


def test_there_is_no_sample_that_is_not_tried() -> None:
    others = {"instancetype", "kustomization", "namespace", "queue"}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {
        *(path.stem for path in SAMPLES),
        *others,
    }

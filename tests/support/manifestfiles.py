"""The manifests as objects, and what the operator makes of a ModelRouter."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import yaml

from modelpool_api.v1alpha1 import ModelRouter
from modelpool_kube.kinds import MODEL_ROUTERS, Json
from modelpool_operator.plan.model import Owner
from modelpool_operator.plan.modelrouter import _RENDERED, CHILDREN, ObservedRouter
from operatorworld import NS

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"


def documents(path: Path) -> list[Json]:
    """Return the objects in a file."""
    return [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each]


def objects(folder: str) -> list[Json]:
    """Return the objects that a kustomization is made of."""
    where = MANIFESTS / folder
    found: list[Json] = []
    for each in documents(where / "kustomization.yaml")[0]["resources"]:
        path = (where / each).resolve()
        if path.is_dir():
            found += objects(str(path.relative_to(MANIFESTS)))
        else:
            found += documents(path)
    return found


def one(folder: str, kind: str, name: str = "") -> Json:
    """Return the one object of *kind*."""
    found = [
        each
        for each in objects(folder)
        if each["kind"] == kind and name in ("", each["metadata"]["name"])
    ]
    assert len(found) == 1
    return found[0]


def rendered() -> dict[str, Json]:
    """Return what a ModelRouter becomes, by kind."""
    spec = {
        "pools": [{"name": "gpu0"}],
        "replicas": 1,
        "keys": {"name": "k"},
        "upstreams": [{"name": "u", "url": "http://h", "apiKey": {"name": "s"}}],
    }
    body = {"metadata": {"name": "front", "namespace": NS, "uid": "u"}, "spec": spec}
    router = ModelRouter.model_validate(body)
    seen = ObservedRouter(
        router, body, datetime.now(UTC), "modelpool:1", (), tuple((each, None) for each in CHILDREN)
    )
    owner = Owner(MODEL_ROUTERS, "front", NS, "u")
    return {kind.kind: _RENDERED[kind](seen, owner) for kind in CHILDREN}

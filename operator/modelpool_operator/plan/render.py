"""
Children: rendering, digests, and the one patch that brings a child to what was rendered.

A digest of the render stands on the child (`SPEC_HASH_ANNOTATION`). It is compared instead of the
fields, because the API server fills in defaults and rewrites quantities; comparing those would
write for ever. Annotations and labels of others are left alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from modelpool_api.names import (
    APP_COMPONENT_LABEL,
    APP_INSTANCE_LABEL,
    APP_MANAGED_BY_LABEL,
    APP_NAME_LABEL,
    APP_PART_OF_LABEL,
    OPERATOR_MANAGER,
    PART_OF,
    SPEC_HASH_ANNOTATION,
)
from modelpool_kube.kinds import Json, Kind, annotation, is_controlled_by, meta

from .model import Action, Create, Owner, patch_of

KEPT_WHOLE = ("annotations",)
"""Maps in a template that others write into: `kubectl rollout restart`, injectors."""


def digest(value: Any) -> str:
    """Return a short digest of JSON; the same value gives the same text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def selector_labels(component: str, instance: str) -> dict[str, str]:
    """Return the labels that find the Pods of one child. Immutable in a Deployment."""
    return {APP_COMPONENT_LABEL: component, APP_INSTANCE_LABEL: instance}


def labels(component: str, instance: str) -> dict[str, str]:
    """Return the labels of a child."""
    return {
        **selector_labels(component, instance),
        APP_NAME_LABEL: PART_OF,
        APP_PART_OF_LABEL: PART_OF,
        APP_MANAGED_BY_LABEL: OPERATOR_MANAGER,
    }


def child(
    kind: Kind,
    owner: Owner,
    component: str,
    content: Mapping[str, Any],
    *,
    annotations: Mapping[str, str] | None = None,
    digested: Any = None,
) -> Json:
    """
    Return a child of *owner*, named like it.

    Args:
        kind: Its kind.
        owner: Whose it is.
        component: What it is part of.
        content: Everything but metadata.
        annotations: Further ones.
        digested: What the digest is made of; None: the content and *annotations*.
    """
    ours = dict(annotations or {})
    made_of = {"content": content, "annotations": ours} if digested is None else digested
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": owner.name,
            "namespace": owner.namespace,
            "labels": labels(component, owner.name),
            "annotations": {**ours, SPEC_HASH_ANNOTATION: digest(made_of)},
            "ownerReferences": [owner.reference()],
        },
        **content,
    }


def is_foreign(found: Json | None, owner: Owner) -> bool:
    """Return whether something of that name is there and belongs to somebody else."""
    return found is not None and not is_controlled_by(found, owner.uid)


def settle(kind: Kind, wanted: Json, found: Json | None) -> Action | None:
    """Return the one action that brings a child to *wanted*; None when it is there."""
    if found is None:
        return Create(kind, wanted["metadata"]["namespace"], wanted)
    key = SPEC_HASH_ANNOTATION
    if annotation(found, key) == annotation(wanted, key):
        return None
    return patch_of(kind, found, changes(wanted, found))


def changes(wanted: Json, found: Json) -> Json:
    """
    Return the merge patch from *found* to *wanted*.

    Of a spec only what was rendered is touched: number of replicas, cluster IP and the like are
    somebody else's.
    """
    patch: Json = {
        "metadata": {"labels": meta(wanted)["labels"], "annotations": meta(wanted)["annotations"]}
    }
    for key, value in wanted.items():
        if key == "spec":
            old = found.get("spec") or {}
            patch[key] = {name: replacing(old.get(name), each) for name, each in value.items()}
        elif key not in ("apiVersion", "kind", "metadata"):
            patch[key] = replacing(found.get(key), value)
    return patch


def replacing(old: Any, new: Any) -> Any:
    """
    Return the merge patch that makes *old* into *new*: what is not in *new* is removed.

    What the API server filled in is removed too, and filled in again.
    """
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    patch: Json = {key: replacing(old.get(key), value) for key, value in new.items()}
    for key, value in old.items():
        if key in KEPT_WHOLE:
            patch.setdefault(key, {})
        elif key not in new and value is not None:
            patch[key] = None
    return patch

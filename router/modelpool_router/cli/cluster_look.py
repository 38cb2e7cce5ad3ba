"""What `doctor` and `adopt` find out about members in a cluster. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelpool_api.names import RECORD_ANNOTATION, SLOT_ANNOTATION, lease_name
from modelpool_kube.errors import Forbidden, KubeError, NotFound, NotServed
from modelpool_kube.kinds import (
    ACCESS_REVIEWS,
    AUTOSCALERS,
    CRDS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    LEASES,
    MEMBER_KINDS,
    MODEL_DEPLOYMENTS,
    PODS,
    REPLICASETS,
    WORKLOADS,
    Json,
    Kind,
    annotation,
    name_of,
)
from modelpool_kube.lease import view
from modelpool_kube.port import ClusterPort
from modelpool_kube.record import Frozen, SlotId, decode, read_mark
from modelpool_kube.slotrules import Member, is_autoscaled, unsafe, wants

GPU_SUFFIXES = ("/gpu", "/gpus")
"""How the resources of accelerators end: ``nvidia.com/gpu``, ``amd.com/gpu``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    is_good: bool
    what: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """A pool, as far as the cluster has to do with it."""

    name: str
    lease_namespace: str
    members: tuple[Member, ...]
    makes_lease: bool = False
    """Whether its router makes the Lease: it is of no ModelPool, so the operator does not."""


async def examine(port: ClusterPort, pools: Sequence[PoolPlace]) -> list[Finding]:
    """Return what is right and wrong with the cluster for *pools*."""
    found = [await _crds(port)]
    for pool in pools:
        found += await _pool(port, pool)
    return found


async def _crds(port: ClusterPort) -> Finding:
    wanted = {kind.plural for kind in MEMBER_KINDS.values() if kind.group == "modelpool.dev"}
    try:
        listed = (await port.list(CRDS, None)).items
    except KubeError as error:
        return Finding(True, f"CRDs were not looked at ({error.message}); a file needs none")
    have = {str((each.get("spec") or {}).get("names", {}).get("plural")) for each in listed}
    if "modelpools" in have:
        missing = sorted({"modelpools", "modelrouters", *wanted} - have)
        if missing:
            return Finding(
                False,
                f"of our CRDs these are missing: {', '.join(missing)}",
                "kubectl apply -k manifests/crds",
            )
        return Finding(True, "CRDs are installed")
    return Finding(True, "no CRDs of ours are installed; pools of a router's own file need none")


async def _pool(port: ClusterPort, pool: PoolPlace) -> list[Finding]:
    found = [await _lease(port, pool)]
    slot = SlotId(pool.lease_namespace, lease_name(pool.name))
    for member in pool.members:
        found += await _member(port, member, slot)
    found += await _rights(port, pool)
    for namespace in sorted({member.namespace for member in pool.members}):
        found += await _gpus(port, namespace, pool)
    return found


async def _lease(port: ClusterPort, pool: PoolPlace) -> Finding:
    what = f"Lease {pool.lease_namespace}/{lease_name(pool.name)}"
    try:
        seen = view(await port.get(LEASES, pool.lease_namespace, lease_name(pool.name)))
    except NotFound:
        who = "the first router" if pool.makes_lease else "the operator"
        return Finding(True, f"{what} does not exist yet; {who} makes it")
    except KubeError as error:
        return Finding(False, f"{what} cannot be read: {error.message}", "grant get on it")
    try:
        record = decode(seen.text)
    except Frozen as error:
        return Finding(False, f"{what}: {error}", f"look at its annotation {RECORD_ANNOTATION}")
    if record is None:
        return Finding(True, f"{what} is held by {seen.holder or 'nobody'}; nothing is recorded")
    state = f"{record.owner or 'nobody'} holds the slot, {record.phase.value}"
    return Finding(True, f"{what} is held by {seen.holder or 'nobody'}: {state}")


async def _member(port: ClusterPort, member: Member, slot: SlotId) -> list[Finding]:
    try:
        obj = await port.get(member.kind, member.namespace, member.target)
    except NotServed:
        return [Finding(False, f"{member}: its kind is not installed", "install the CRDs")]
    except NotFound:
        return [Finding(False, f"{member} does not exist", "create it, or correct the name")]
    except KubeError as error:
        return [Finding(False, f"{member} cannot be read: {error.message}", "grant get on it")]
    why = unsafe(member.kind, obj)
    if why is not None:
        text, _, way_out = why.partition("; ")
        return [Finding(False, f"{member}: {text}", way_out)]
    mark = read_mark(annotation(obj, SLOT_ANNOTATION))
    if mark is not None and mark.slot != slot:
        return [
            Finding(
                False,
                f"{member} is a member of the slot {mark.slot.namespace}/{mark.slot.lease}",
                f"take it out of one of the two pools, or remove its annotation {SLOT_ANNOTATION}",
            )
        ]
    scaler = await _autoscaler(port, member)
    if scaler is not None:
        return [
            Finding(
                False,
                f"HorizontalPodAutoscaler {scaler} scales {member}",
                f"kubectl delete hpa {scaler} -n {member.namespace}",
            )
        ]
    return [Finding(True, f"{member} can be a member; it asks for {wants(member.kind, obj)}")]


async def _autoscaler(port: ClusterPort, member: Member) -> str | None:
    try:
        return is_autoscaled(member, (await port.list(AUTOSCALERS, member.namespace)).items)
    except KubeError:
        return None


def needed_rights(pool: PoolPlace) -> list[tuple[str, Kind, str, str]]:
    """Return (verb, kind, namespace, name) of everything that a router of *pool* asks for."""
    lease = lease_name(pool.name)
    rights = [(verb, LEASES, pool.lease_namespace, lease) for verb in ("get", "patch")]
    if pool.makes_lease:
        # Nobody can be allowed to make just one of a certain name.
        rights.append(("create", LEASES, pool.lease_namespace, ""))
    for member in pool.members:
        for verb in ("get", "patch", "list", "watch"):
            rights.append((verb, member.kind, member.namespace, member.target))
        if member.kind == INFERENCE_SERVICES:
            for verb in ("get", "list", "watch"):
                rights.append((verb, DEPLOYMENTS, member.namespace, member.target))
        if member.kind == MODEL_DEPLOYMENTS:
            rights.append(("list", WORKLOADS, member.namespace, ""))
        for kind in (PODS, REPLICASETS, AUTOSCALERS):
            for verb in ("list", "watch"):
                rights.append((verb, kind, member.namespace, ""))
    # The Pod of the router that held the slot before; those of all, where no Lease tells.
    for verb in ("get", "list"):
        rights.append((verb, PODS, pool.lease_namespace, ""))
    return list(dict.fromkeys(rights))


async def _rights(port: ClusterPort, pool: PoolPlace) -> list[Finding]:
    missing: list[str] = []
    rights = needed_rights(pool)
    for verb, kind, namespace, name in rights:
        attributes = {
            "verb": verb,
            "group": kind.group,
            "resource": kind.plural,
            "namespace": namespace,
            **({"name": name} if name else {}),
        }
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": ACCESS_REVIEWS.kind,  # never stored, so the server refuses any metadata
            "spec": {"resourceAttributes": attributes},
        }
        try:
            answer = await port.create(ACCESS_REVIEWS, None, body)
        except KubeError as error:
            return [Finding(False, f"rights cannot be asked for: {error.message}", "try again")]
        if not (answer.get("status") or {}).get("allowed"):
            what = f"{kind.plural}/{name}" if name else kind.plural
            missing.append(f"{verb} {what} in {namespace}")
    if missing:
        return [
            Finding(
                False,
                f"these credentials may not {text}",
                "grant it in a Role; a ModelRouter gets it from the operator",
            )
            for text in missing
        ]
    return [
        Finding(True, f"these credentials have all {len(rights)} rights that {pool.name} needs")
    ]


async def _gpus(port: ClusterPort, namespace: str, pool: PoolPlace) -> list[Finding]:
    try:
        pods = (await port.list(PODS, namespace)).items
    except Forbidden:
        return []
    except KubeError as error:
        return [Finding(False, f"Pods of {namespace} cannot be listed: {error.message}")]
    targets = {member.target for member in pool.members}
    found: list[Finding] = []
    for pod in pods:
        held = gpus_of(pod)
        if not held or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        is_member = any(name_of(pod).startswith(f"{target}-") for target in targets)
        if not is_member:
            found.append(
                Finding(
                    True,
                    f"Pod {namespace}/{name_of(pod)}, no member, holds {held}; "
                    "a member that does not fit beside it stays Pending",
                )
            )
    return found


def gpus_of(pod: Json) -> str:
    """Return the accelerators that *pod* asks for, as ``1 nvidia.com/gpu``; empty for none."""
    amounts: dict[str, int] = {}
    for container in (pod.get("spec") or {}).get("containers") or []:
        limits = (container.get("resources") or {}).get("limits") or {}
        for key, value in limits.items():
            if key.endswith(GPU_SUFFIXES) and str(value).isdigit():
                amounts[key] = amounts.get(key, 0) + int(value)
    return ", ".join(f"{amount} {key}" for key, amount in sorted(amounts.items()) if amount)


ENGINES: Mapping[str, tuple[str, ...]] = {
    "llama-server": ("llama-server", "llama.cpp", "llama-cpp"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "tgi": ("text-generation-inference", "text-generation-launcher"),
}


def guess_profile(template: Json) -> str:
    """Return the profile that the first container of a Pod template looks like."""
    containers = (template.get("spec") or {}).get("containers") or [{}]
    first = containers[0]
    words: Iterable[Any] = (
        first.get("image", ""),
        *(first.get("command") or []),
        *(first.get("args") or []),
    )
    text = " ".join(str(word) for word in words).lower()
    for name, marks in ENGINES.items():
        if any(mark in text for mark in marks):
            return name
    return "generic"


async def slots(port: ClusterPort, namespace: str) -> list[dict[str, Any]]:
    """Return what the Leases of *namespace* say of their slots, as plain JSON, by pool."""
    found: list[dict[str, Any]] = []
    for lease in (await port.list(LEASES, namespace)).items:
        if not name_of(lease).startswith(lease_name("")):
            continue
        seen = view(lease)
        slot: dict[str, Any] = {
            "pool": name_of(lease).removeprefix(lease_name("")),
            "router": seen.holder,
        }
        try:
            record = decode(seen.text)
        except Frozen as error:
            found.append({**slot, "trouble": str(error)})
            continue
        if record is None:
            continue  # a Lease of somebody else, or nobody has begun yet
        found.append(
            {
                **slot,
                "phase": record.phase.value,
                "owner": record.owner,
                "target": record.target,
                "since": record.since,
                "reason": record.reason,
                "held": record.held,
                "epoch": record.epoch,
                "forgotten": list(record.forgotten),
            }
        )
    return sorted(found, key=lambda each: str(each["pool"]))


def slot_line(slot: Mapping[str, Any]) -> str:
    """Return one line about a slot, for people."""
    if "trouble" in slot:
        return f"{slot['pool']}: frozen: {slot['trouble']}"
    who = slot["owner"] or "nobody"
    doing = {
        "resident": f"{who} is resident",
        "draining": f"{who} finishes its answers before {slot['target'] or 'another member'}",
        "unloading": f"{who} is unloading",
        "loading": f"{slot['target']} is loading",
        "cold": "the slot is empty",
        "released": "the slot was emptied on purpose",
    }[slot["phase"]]
    parts = [f"{slot['pool']}: {doing}"]
    if slot["since"]:
        parts.append(f"since {slot['since'][:19]}Z")
    if slot["reason"]:
        parts.append(str(slot["reason"]))
    if slot["held"]:
        parts.append(f"{slot['held']} held")
    parts.append(f"moved by {slot['router']}" if slot["router"] else "no router holds it")
    return "; ".join(parts)


async def why_not(port: ClusterPort, pools: Sequence[PoolPlace], model: str) -> list[str]:
    """Return sentences about what a request for *model*, a member's name, would wait for."""
    for pool in pools:
        for member in pool.members:
            if member.name != model:
                continue
            said: list[str] = []
            for slot in await slots(port, pool.lease_namespace):
                if slot["pool"] == pool.name:
                    said.append(f"{slot_line(slot)}.")
                    if slot.get("owner") == model and slot.get("phase") == "resident":
                        said.append(f"A request for {model} is served at once.")
            if not said:
                said.append(f"No router has moved the slot of {pool.name} yet.")
            slot_id = SlotId(pool.lease_namespace, lease_name(pool.name))
            for each in pool.members:
                for finding in await _member(port, each, slot_id):
                    if not finding.is_good:
                        said.append(f"{finding.what}: {finding.way_out}.")
            return said
    return []

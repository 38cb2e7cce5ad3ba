"""``modelpool trace``: the replacements of a ModelDeployment, and what they wait for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .exits import ExitCode, fail
from .words import count_text, plain_table, seconds_text

if TYPE_CHECKING:
    from modelpool_kube.port import ClusterPort

Json = dict[str, Any]

KINDS = ("md", "mdep", "modeldeployment", "modeldeployments")
RECORD = "modelpool.dev/replacements"
TROUBLES = ("Accepted", "Rendered", "Stalled", "QuotaReserved", "ReplicasUpToDate")
"""Conditions that say why nothing goes on, in the order in which they are looked at."""


def trace(
    target: Annotated[str, typer.Argument(help="Which one: md/NAME or NAME.", metavar="md/NAME")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    context: Annotated[
        str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="Kubeconfig file; default: as kubectl finds it.")
    ] = None,
) -> None:
    """
    Show the replacements of a ModelDeployment: those under way, and every step of the past hour.

    Examples:

        modelpool trace md/chat -n team-a

        modelpool trace chat --json | jq .history
    """
    import asyncio

    name = _name(target)
    try:
        from modelpool_kube.client import connect
        from modelpool_kube.errors import Forbidden, KubeError, NotFound
    except ImportError as error:
        fail(
            f"this command needs a Kubernetes client ({error})",
            ExitCode.USAGE,
            "pip install 'modelpool[kubernetes]'",
        )

    async def look() -> Json:
        client = await connect(manager="modelpool-cli", kubeconfig=kubeconfig, context=context)
        async with client:
            return await gather(client, namespace, name)

    try:
        found = asyncio.run(look())
    except NotFound:
        fail(
            f"there is no ModelDeployment {namespace}/{name}",
            ExitCode.FAILED,
            "kubectl get modeldeployments -A",
        )
    except Forbidden as error:
        fail(str(error), ExitCode.REFUSED, "ask for get on modeldeployments and list on events")
    except KubeError as error:
        fail(str(error), ExitCode.UNREACHABLE, "check KUBECONFIG, or name one with --kubeconfig")
    typer.echo(json.dumps(found, indent=2) if as_json else told(found), nl=as_json)


def _name(target: str) -> str:
    kind, split, name = target.partition("/")
    if not split:
        return target
    if kind.lower() not in KINDS or not name:
        fail(
            f"{target} names no ModelDeployment",
            ExitCode.USAGE,
            "write md/NAME, or the name alone",
        )
    return name


async def gather(port: ClusterPort, namespace: str, name: str) -> Json:
    """
    Return what is known of a ModelDeployment: ``name``, ``open`` replacements, ``history``.

    Raises:
        KubeError: it is not there, or cannot be read.
    """
    from modelpool_kube.kinds import EVENTS, MODEL_DEPLOYMENTS

    deployment = await port.get(MODEL_DEPLOYMENTS, namespace, name)
    events = (await port.list(EVENTS, namespace)).items
    return account(deployment, events, port.wall())


def account(deployment: Json, events: Sequence[Json], now: datetime) -> Json:
    """Return the account of *deployment* as plain JSON; see `gather`."""
    meta, status = deployment["metadata"], deployment.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    return {
        "namespace": meta.get("namespace", ""),
        "name": meta["name"],
        "phase": status.get("phase") or "Unknown",
        "roles": status.get("roleSummary") or "",
        "generation": meta.get("generation", 0),
        "observedGeneration": status.get("observedGeneration", 0),
        "troubles": [
            {"condition": kind, "reason": each["reason"], "message": each.get("message", "")}
            for kind in TROUBLES
            if (each := conditions.get(kind)) is not None and _is_bad(kind, each)
        ],
        "open": _open(meta, status, now),
        "history": _history(meta.get("uid", ""), events),
    }


def _is_bad(kind: str, condition: Mapping[str, Any]) -> bool:
    if condition.get("reason") == "ReplacementBlocked":
        return kind == "Stalled"  # the others say the same
    return bool(condition["status"] == ("True" if kind == "Stalled" else "False"))


def _open(meta: Json, status: Json, now: datetime) -> list[Json]:
    text = (meta.get("annotations") or {}).get(RECORD)
    if text is None:
        return []
    reasons = {
        each["name"]: (each.get("replacement") or {}).get("reason", "")
        for each in status.get("roles") or []
    }
    try:
        record = json.loads(text)
        slots = {role: slot for role, slot in record.items() if not role.startswith("/")}
        return [_slot(role, slot, reasons.get(role, ""), now) for role, slot in slots.items()]
    except (ValueError, AttributeError, KeyError, TypeError):
        why = "the record cannot be read; the condition Stalled says what to do"
        return [{"role": "?", "ordinal": None, "phase": "Unreadable", "waits": why}]


def _slot(role: str, slot: Mapping[str, Any], reason: str, now: datetime) -> Json:
    since = _time(slot.get("since"))
    return {
        "role": role,
        "ordinal": int(slot["ordinal"]),
        "phase": str(slot["phase"]),
        "cause": slot.get("cause", ""),
        "for_s": None if since is None else max(0.0, (now - since).total_seconds()),
        "captured": len(slot.get("memberUIDs", ())),
        "wanted": len(slot.get("memberHashes", ())),
        "made": len(slot.get("currentMemberUIDs", ())),
        "has_workload": bool(slot.get("currentWorkloadUID")),
        "waits": reason,
    }


def _history(uid: str, events: Sequence[Json]) -> list[Json]:
    mine = [each for each in events if (each.get("regarding") or {}).get("uid") == uid]
    # What was told within one tick is in the order in which it was stored.
    mine.sort(key=lambda each: (str(each.get("eventTime") or ""), _stored(each)))
    return [
        {
            "at": str(each.get("eventTime") or ""),
            "reason": str(each.get("reason") or ""),
            "note": str(each.get("note") or ""),
            "times": int((each.get("series") or {}).get("count", 1)),
            "warning": each.get("type") == "Warning",
        }
        for each in mine
    ]


def _stored(event: Mapping[str, Any]) -> int:
    text = str((event.get("metadata") or {}).get("resourceVersion", ""))
    return int(text) if text.isascii() and text.isdigit() else 0


def _time(text: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def told(found: Mapping[str, Any]) -> str:
    """Return an account as text for people."""
    lines = [
        f"ModelDeployment {found['namespace']}/{found['name']}: {found['phase']}; {found['roles']}"
    ]
    if found["observedGeneration"] != found["generation"]:
        lines.append(
            f"  the operator has not seen generation {found['generation']} yet "
            f"(it has seen {found['observedGeneration']}); does it run?"
        )
    lines += [
        f"  {each['condition']}: {each['reason']}: {each['message']}" for each in found["troubles"]
    ]
    lines.append("")
    if found["open"]:
        lines.append("being replaced:")
        for slot in found["open"]:
            lines += _slot_lines(slot)
    else:
        lines.append("nothing is being replaced")
    lines.append("")
    if found["history"]:
        rows: list[tuple[str, ...]] = [
            (
                each["at"][:19].replace("T", " "),
                each["reason"],
                each["note"] + (f" ({each['times']} times)" if each["times"] > 1 else ""),
            )
            for each in found["history"]
        ]
        lines.append(plain_table(("WHEN (UTC)", "WHAT", "WHY"), rows))
    else:
        lines.append("no events (the API server keeps them for an hour)")
    return "\n".join(lines) + "\n"


def _slot_lines(slot: Mapping[str, Any]) -> list[str]:
    if slot["ordinal"] is None:
        return [f"  {slot['waits']}"]
    lines = [
        f"  {slot['role']}/{slot['ordinal']}: {slot['phase']} for {seconds_text(slot['for_s'])}"
        f", because it is {slot['cause']}"
    ]
    if slot["phase"] == "Cleanup":
        lines.append(f"    {count_text(slot['captured'], 'old member')} to be deleted")
    else:
        workload = "a Workload" if slot["has_workload"] else "no Workload yet"
        lines.append(f"    {slot['made']} of {slot['wanted']} new members, {workload}")
    if slot["waits"]:
        lines.append(f"    waits: {slot['waits']}")
    lines.append(f"    until it is done no other replica of role {slot['role']} is replaced")
    return lines

"""``modelpool doctor``, ``adopt`` and ``forget``: pools whose members are in Kubernetes."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from .configuring import refuse_config
from .exits import ExitCode, fail

if TYPE_CHECKING:
    from modelpool_kube.port import ClusterPort
    from modelpool_kube.record import SlotRecord

    from .cluster_look import PoolPlace

T = TypeVar("T")

NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace of members and Lease.")
]
ContextOption = Annotated[
    str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")
]
KubeconfigOption = Annotated[
    str | None, typer.Option(help="Kubeconfig file; default: as kubectl finds it.")
]
KINDS = {
    "deploy": "Deployment",
    "deployment": "Deployment",
    "deployments": "Deployment",
    "sts": "StatefulSet",
    "statefulset": "StatefulSet",
    "statefulsets": "StatefulSet",
    "isvc": "InferenceService",
    "inferenceservice": "InferenceService",
    "mdep": "ModelDeployment",
    "modeldeployment": "ModelDeployment",
}


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Router's file with pools; default: ModelPools."),
    ] = None,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """
    Say whether the cluster is as the pools need it: members, rights, autoscalers, who holds GPUs.

    Changes nothing. Without FILE it looks at the ModelPools of the namespace.

    Examples:

        modelpool doctor pool.yaml

        modelpool doctor -n lab
    """

    async def look(port: ClusterPort) -> list[Any]:
        from .cluster_look import examine

        pools = (
            await _model_pools(port, namespace) if file is None else _file_pools(file, namespace)
        )
        if not pools:
            what, way_out = without_pools(file, namespace, are_served=pools is not None)
            fail(what, ExitCode.FAILED, way_out)
        return await examine(port, pools)

    findings = _with_cluster(look, kubeconfig, context)
    for each in findings:
        mark, colour = ("ok ", typer.colors.GREEN) if each.is_good else ("bad", typer.colors.RED)
        typer.echo(f"{typer.style(mark, fg=colour)}  {each.what}")
        if each.way_out:
            typer.echo(f"     way out: {each.way_out}")
    if not all(each.is_good for each in findings):
        raise typer.Exit(ExitCode.FAILED)


def adopt(
    targets: Annotated[
        list[str], typer.Argument(metavar="KIND/NAME...", help="As in deploy/a deploy/b sts/c.")
    ],
    pool: Annotated[str, typer.Option("--pool", help="Name of the pool.")],
    output: Annotated[str, typer.Option("--output", "-o", help="yaml or json.")] = "yaml",
    for_file: Annotated[
        bool, typer.Option("--file", help="Write a pool of a router's file, not a ModelPool.")
    ] = False,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """
    Write the pool of workloads that run already. Nothing in the cluster is changed.

    What has to be changed on them first is told on standard error.

    Examples:

        modelpool adopt deploy/small deploy/large --pool gpu0 -n lab -o yaml | kubectl apply -f -

        modelpool adopt deploy/small deploy/large --pool gpu0 -n lab --file >> pool.yaml
    """
    wanted = [_target(each) for each in targets]
    if output not in ("yaml", "json"):
        fail(f"{output!r} is no form", ExitCode.USAGE, "write -o yaml or -o json")

    async def look(port: ClusterPort) -> tuple[dict[str, Any], list[str]]:
        return await adopted(port, pool, wanted, namespace, for_file=for_file)

    made, notes = _with_cluster(look, kubeconfig, context)
    for note in notes:
        typer.secho(f"first: {note}", fg=typer.colors.YELLOW, err=True)
    if output == "json":
        typer.echo(json.dumps(made, indent=2))
        return
    import io

    from ruamel.yaml import YAML

    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    yaml.dump(made, text)
    typer.echo(text.getvalue(), nl=False)


async def adopted(
    port: ClusterPort, pool: str, wanted: list[tuple[str, str]], namespace: str, *, for_file: bool
) -> tuple[dict[str, Any], list[str]]:
    """
    Return the pool of *wanted* objects, and what has to be done to them first.

    Args:
        port: The cluster.
        pool: Name of the pool.
        wanted: Kind and name of each.
        namespace: Of all of them.
        for_file: Whether it is for a router's file, else a ModelPool.
    """
    from modelpool_api.names import API_VERSION
    from modelpool_api.v1alpha1.modelpool import REFS
    from modelpool_kube.errors import NotFound
    from modelpool_kube.kinds import MEMBER_KINDS
    from modelpool_kube.slotrules import Member, unsafe, wants

    from .cluster_look import guess_profile

    members: list[dict[str, Any]] = []
    notes: list[str] = []
    up: list[str] = []
    for kind, name in wanted:
        member = Member(name, MEMBER_KINDS[kind], namespace, name)
        try:
            obj = await port.get(member.kind, namespace, name)
        except NotFound:
            fail(f"{member} does not exist", ExitCode.FAILED, "correct the name or the namespace")
        why = unsafe(member.kind, obj)
        if why is not None:
            notes.append(f"{member}: {why}")
        if wants(member.kind, obj):
            up.append(name)
        template = (obj.get("spec") or {}).get("template") or {}
        known = guess_profile(template) if template else None
        place = {"namespace": namespace, "name": name}
        if for_file:
            key = REFS[kind].removesuffix("Ref")
            entry: dict[str, Any] = {"name": name, key: place}
        else:
            entry = {"name": name, REFS[kind]: {"name": name}}
        if known is not None:
            entry["profile"] = known
        members.append(entry)
    if len(up) > 1:
        notes.append(f"{', '.join(up)} are all up; all but one are stopped when they are idle")
    spec: dict[str, Any] = {"members": members}
    if len(up) == 1:
        spec["default"] = up[0]
    if for_file:
        return {"pools": [{"name": pool, **spec}]}, notes
    meta = {"name": pool, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": "ModelPool", "metadata": meta, "spec": spec}, notes


def forget(
    pod: Annotated[str, typer.Argument(help="Pod of a member on a lost node, or a lost router.")],
    pool: Annotated[
        str | None, typer.Option("--pool", help="Its pool; default: the only one there.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """
    Declare that POD does not run any more, although nobody can see that it does not.

    Only you can know: its machine is off, or unplugged. If it runs all the same, two models may
    be up at once. Better: delete its Node, or taint it node.kubernetes.io/out-of-service.

    Example:

        modelpool forget coder-7d9c-x2x5w -n lab
    """
    if not yes:
        typer.confirm(
            f"Is the machine of {pod} really off, so that nothing of it runs?", abort=True
        )

    async def act(port: ClusterPort) -> str:
        return await forgotten(port, namespace, pod, pool)

    typer.echo(_with_cluster(act, kubeconfig, context))


async def forgotten(port: ClusterPort, namespace: str, pod: str, pool: str | None) -> str:
    """Write into the record of the pool that *pod* is gone; return what was done, in words."""
    from modelpool_api.names import RECORD_ANNOTATION, lease_name
    from modelpool_kube.errors import Conflict, NotFound
    from modelpool_kube.kinds import LEASES, PODS, uid
    from modelpool_kube.lease import view
    from modelpool_kube.record import Frozen, SlotRecord, decode, encode

    lease = lease_name(pool) if pool is not None else await _only_lease(port, namespace)
    try:
        what = uid(await port.get(PODS, namespace, pod))
    except NotFound:
        what = pod  # a router, which is known by its name
    for _ in range(10):
        try:
            seen = view(await port.get(LEASES, namespace, lease))
            record: SlotRecord = decode(seen.text) or SlotRecord()
        except NotFound:
            fail(f"there is no Lease {lease}", ExitCode.FAILED, "name the pool with --pool")
        except Frozen as error:
            fail(str(error), ExitCode.FAILED)
        if what in record.forgotten:
            return f"{pod} is forgotten already"
        after = replace(record, forgotten=(*record.forgotten, what))
        patch = {"metadata": {"annotations": {RECORD_ANNOTATION: encode(after)}}}
        try:
            await port.patch_merge(LEASES, namespace, lease, patch, version=seen.version)
        except Conflict:
            continue  # its holder renews it every few seconds
        await _tell(port, namespace, lease, pod)
        return f"{pod} counts as gone; the router goes on within seconds"
    fail(f"the Lease {lease} changes all the time", ExitCode.FAILED, "try again")


async def _only_lease(port: ClusterPort, namespace: str) -> str:
    from modelpool_api.names import RECORD_ANNOTATION
    from modelpool_kube.kinds import LEASES, annotation, name_of

    listed = (await port.list(LEASES, namespace)).items
    names = [name_of(each) for each in listed if annotation(each, RECORD_ANNOTATION) is not None]
    if len(names) != 1:
        told = ", ".join(name.removeprefix("modelpool-") for name in names) or "none"
        fail(f"which pool? In {namespace} there are: {told}", ExitCode.USAGE, "name it: --pool")
    return names[0]


async def _tell(port: ClusterPort, namespace: str, lease: str, pod: str) -> None:
    """Leave an Event; without the right to, the record has to do."""
    from contextlib import suppress

    from modelpool_api.names import CLI_MANAGER, EventReason
    from modelpool_kube.errors import KubeError
    from modelpool_kube.kinds import EVENTS, LEASES
    from modelpool_kube.lease import micro_time

    regarding = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "name": lease}
    body = {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"generateName": f"{lease}-", "namespace": namespace},
        "eventTime": micro_time(port.wall()),
        "action": "Forget",
        "type": "Warning",
        "reason": EventReason.POD_FORGOTTEN.value,
        "note": f"somebody declared that {pod} does not run any more",
        "reportingController": CLI_MANAGER,
        "reportingInstance": os.environ.get("USER", "unknown"),
        "regarding": {**regarding, "namespace": namespace},
    }
    with suppress(KubeError):
        await port.create(EVENTS, namespace, body)


def print_slots(
    namespace: str, kubeconfig: str | None, context: str | None, *, as_json: bool
) -> None:
    """Print what the Leases of *namespace* say: the status without a router's admin port."""

    async def look(port: ClusterPort) -> list[dict[str, Any]]:
        from .cluster_look import slots

        return await slots(port, namespace)

    from .cluster_look import slot_line

    found = _with_cluster(look, kubeconfig, context)
    if as_json:
        typer.echo(json.dumps({"slots": found}, indent=2))
    elif not found:
        typer.echo(f"no slot is recorded in {namespace}")
    for each in () if as_json else found:
        typer.echo(slot_line(each))


def print_why(
    model: str, namespace: str, kubeconfig: str | None, context: str | None, *, as_json: bool
) -> None:
    """Print what a request for *model* would wait for, by the objects of *namespace*."""

    async def look(port: ClusterPort) -> list[str]:
        from .cluster_look import why_not

        return await why_not(port, await _model_pools(port, namespace) or [], model)

    sentences = _with_cluster(look, kubeconfig, context)
    if not sentences:
        fail(
            f"no ModelPool in {namespace} has a member {model!r}",
            ExitCode.FAILED,
            "name its namespace with -n, or ask the router itself with --admin",
        )
    if as_json:
        typer.echo(json.dumps({"model": model, "sentences": sentences}, indent=2))
        return
    for sentence in sentences:
        typer.echo(sentence)


def _target(text: str) -> tuple[str, str]:
    word, slash, name = text.partition("/")
    kind = KINDS.get(word.lower().partition(".")[0])
    if not slash or not name or kind is None:
        fail(
            f"{text!r} is no KIND/NAME", ExitCode.USAGE, "write deploy/NAME, sts/NAME or isvc/NAME"
        )
    return kind, name


def _file_pools(file: Path, namespace: str) -> list[PoolPlace]:
    from modelpool_kube.kinds import MEMBER_KINDS
    from modelpool_kube.slotrules import Member

    from ..settings import ConfigError, load
    from .cluster_look import PoolPlace

    try:
        settings = load(file, os.environ)
    except ConfigError as error:
        refuse_config(error)
        raise
    places = []
    for pool in settings.pools:
        members = [(m.name, m.kubernetes) for m in pool.members if m.kubernetes is not None]
        if members:
            made = tuple(
                Member(name, MEMBER_KINDS[kind], place.namespace, place.name)
                for name, (kind, place) in members
            )
            where = settings.lease_namespace or namespace
            places.append(PoolPlace(pool.name, where, made, makes_lease=True))
    return places


def without_pools(file: Path | None, namespace: str, *, are_served: bool) -> tuple[str, str]:
    """Return what is to be said where there is no pool to look at, and the way out."""
    if file is not None:
        return (
            f"no pool of {file} has its members in Kubernetes",
            "write deployment, statefulSet, inferenceService or modelDeployment to its members",
        )
    if not are_served:
        return (
            "the CRDs of modelpool.dev are not installed in this cluster",
            "kubectl apply --server-side -k manifests/base; or name the file of a router",
        )
    return (
        f"there is no ModelPool in namespace {namespace}",
        "name another one with -n, or the file of a router; `modelpool adopt` writes a ModelPool",
    )


async def _model_pools(port: ClusterPort, namespace: str) -> list[PoolPlace] | None:
    """Return the pools of *namespace*; None where nobody knows what a ModelPool is."""
    from modelpool_api.v1alpha1.modelpool import ModelPool
    from modelpool_kube.errors import NotServed
    from modelpool_kube.kinds import MEMBER_KINDS, MODEL_POOLS, name_of
    from modelpool_kube.slotrules import Member

    from .cluster_look import PoolPlace

    try:
        listed = (await port.list(MODEL_POOLS, namespace)).items
    except NotServed:
        return None
    places = []
    for obj in listed:
        spec = ModelPool.model_validate({k: v for k, v in obj.items() if k != "status"}).spec
        members = tuple(
            Member(m.member_name, MEMBER_KINDS[m.kind], namespace, m.target) for m in spec.members
        )
        places.append(PoolPlace(name_of(obj), namespace, members))
    return places


def _with_cluster(
    work: Callable[[ClusterPort], Awaitable[T]], kubeconfig: str | None, context: str | None
) -> T:
    """Run *work* with a client; end the command in words when there is none."""
    import asyncio

    from modelpool_api.names import CLI_MANAGER
    from modelpool_kube.client import connect
    from modelpool_kube.errors import Forbidden, KubeError

    async def run() -> T:
        async with await connect(
            manager=CLI_MANAGER, kubeconfig=kubeconfig, context=context
        ) as client:
            return await work(client)

    try:
        return asyncio.run(run())
    except Forbidden as error:
        fail(f"these credentials may not do that: {error}", ExitCode.REFUSED, "grant it in a Role")
    except KubeError as error:
        fail(
            f"the API server cannot be asked: {error}",
            ExitCode.UNREACHABLE,
            "check --context and --kubeconfig, and that it answers kubectl",
        )

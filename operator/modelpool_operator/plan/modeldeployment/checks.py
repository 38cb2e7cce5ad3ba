"""
What an edit may not ask for and the API server's own rules cannot see.

Every sentence has the path of the field, the value, the reason and the way out. A role is judged
against its InstanceType only when its own wish has moved: drift of the type under an unchanged
role must not bar an edit of something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from modelpool_api.names import ACCEPTED_ANNOTATION
from modelpool_api.v1alpha1.instancetype import InstanceType
from modelpool_api.v1alpha1.modeldeployment import ModelDeployment, Role

from .command import owned_flag, port_flag
from .parallel import Unreadable, degrees
from .render import asks_for_slice, cards, placement


def problems(deployment: ModelDeployment, types: Mapping[str, InstanceType]) -> list[str]:
    """Return what is wrong with the specification; while anything is, nothing is changed."""
    accepted = _accepted(deployment)
    found: list[str] = []
    for number, role in enumerate(deployment.spec.roles):
        at = f"spec.roles[{number}]"
        found += _commands(deployment, role, at)
        kind = types.get(role.instance_type)
        if kind is None:
            continue  # the render says so
        if accepted.get(role.name) == _wish(deployment, role, kind):
            continue
        found += _resources(deployment, role, kind, at)
        found += _parallel(deployment, role, kind, at)
    return found


def accept(deployment: ModelDeployment, types: Mapping[str, InstanceType]) -> str:
    """Return what is remembered of a specification without problems; the same for the same one."""
    found = {
        role.name: _wish(deployment, role, types[role.instance_type])
        for role in deployment.spec.roles
        if role.instance_type in types
    }
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def _wish(deployment: ModelDeployment, role: Role, kind: InstanceType) -> str:
    """Return all of *role* that is judged against its type: what it asks, and for how many."""
    asked = degrees(deployment.spec, role)
    return "/".join((placement(role, kind), str(role.size), "-" if asked is None else str(asked)))


def _accepted(deployment: ModelDeployment) -> dict[str, object]:
    try:
        found = json.loads(deployment.metadata.annotations.get(ACCEPTED_ANNOTATION, "{}"))
    except ValueError:
        return {}  # then everything is judged again
    return found if isinstance(found, dict) else {}


def _commands(deployment: ModelDeployment, role: Role, at: str) -> Iterator[str]:
    spec = deployment.spec
    owned = owned_flag(spec, role)
    if owned is not None:
        yield (
            f'{at}.extraArgs "{owned}": the served name is written by the operator from '
            f'spec.model.name ("{spec.model.name}"); remove the flag, or write the whole command '
            "line into command"
        )
    where = "command" if role.command else "extraArgs"
    own = port_flag(role.command or role.extra_args)
    if own is not None and role.ports and own != role.ports[0].container_port:
        declared = role.ports[0].container_port
        yield (
            f"{at}.{where} --port {own}: contradicts {at}.ports[0].containerPort {declared}, where "
            "requests go; make them equal, or remove one"
        )


def _resources(
    deployment: ModelDeployment, role: Role, kind: InstanceType, at: str
) -> Iterator[str]:
    keys, wanted = kind.spec.accelerator, role.resources
    memory, cores = (
        wanted.accelerator_sliced_memory_percentage,
        wanted.accelerator_sliced_cores_percentage,
    )
    type_name = f'InstanceType "{role.instance_type}"'
    if memory and (keys is None or keys.slice_memory is None):
        yield (
            f"{at}.resources.acceleratorSlicedMemoryPercentage {memory}: {type_name} offers no "
            "slices; ask for whole cards, or name the resource key in its "
            "spec.accelerator.sliceMemory"
        )
    if cores and (keys is None or keys.slice_cores is None):
        yield (
            f"{at}.resources.acceleratorSlicedCoresPercentage {cores}: {type_name} offers no "
            "share of cores; remove it, or name the resource key in its spec.accelerator.sliceCores"
        )
    if cores and not memory:
        yield (
            f"{at}.resources.acceleratorSlicedCoresPercentage {cores}: a slice is a share of "
            "memory first; set acceleratorSlicedMemoryPercentage too"
        )
    if asks_for_slice(role) and wanted.accelerator:
        yield (
            f"{at}.resources.accelerator {wanted.accelerator}: whole cards and a slice exclude "
            "one another; remove one of them"
        )
    has_cards = keys is not None and keys.card is not None
    if wanted.accelerator and not has_cards:
        yield (
            f"{at}.resources.accelerator {wanted.accelerator}: {type_name} has no cards; name "
            "another type, or set accelerator to 0"
        )
    capacity = kind.spec.capacity.cards if kind.spec.capacity is not None else None
    number = cards(role, kind)
    if capacity is not None and number * role.size > capacity:
        yield (
            f"{at}.resources.accelerator {number}: a replica of {role.size} members wants "
            f"{number * role.size} cards and {type_name} has {capacity} in all; ask for fewer, or "
            "name another type"
        )
    shared = [
        other.name
        for other in deployment.spec.roles
        if other.name != role.name and other.instance_type == role.instance_type
    ]
    if wanted.accelerator == 0 and has_cards and not asks_for_slice(role) and shared:
        yield (
            f"{at}.resources.accelerator 0: {type_name} has cards and role {shared[0]} uses it "
            "too, so a replica without one would take the machine share of a card; ask for at "
            "least 1, or name a type without cards"
        )


def _parallel(
    deployment: ModelDeployment, role: Role, kind: InstanceType, at: str
) -> Iterator[str]:
    asked = degrees(deployment.spec, role)
    way_out = "or write the whole command line into command, which nobody reads"
    if isinstance(asked, Unreadable):
        yield (
            f'{at}.extraArgs {asked.flag} "{asked.value}": role {role.name} asks for a parallel '
            f"degree that is no whole number from 1; correct it, {way_out}"
        )
    elif asked is not None:
        devices = 1 if asks_for_slice(role) else cards(role, kind)
        width = asked.width(role.size)
        # A type without cards counts something else than cards.
        if 0 < devices < width:
            share = "a slice" if asks_for_slice(role) else f"accelerator {devices}"
            yield (
                f"{at}.extraArgs {asked}: each member of role {role.name} needs {width} cards and "
                f"has {share}; ask for {width} in {at}.resources.accelerator, lower the degrees, "
                f"{way_out}"
            )

"""InstanceType: a kind of machine share that roles of a ModelDeployment can be put on."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ..meta import (
    LABEL_PATTERN,
    ApiModel,
    Conditions,
    ObjectMeta,
    Quantity,
    Rule,
    node,
    text,
)
from ..names import API_VERSION
from .container import NodeSelector, Quantities, Tolerations

_KEY = "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
ResourceKey = Annotated[str, text(317, 1, _KEY)]
"""Name of an extended resource: `nvidia.com/gpu`."""

SLICES_TOGETHER = Rule(
    rule="has(self.sliceMemory) || !has(self.sliceCores)",
    message="sliceCores without sliceMemory: a slice is a share of memory first; name the resource "
    "key of the memory percentage in sliceMemory, or remove sliceCores",
    shown="'sliceCores \"' + self.sliceCores + '\" without sliceMemory: a slice is a share of "
    "memory first; name the resource key of the memory percentage in sliceMemory, or remove "
    "sliceCores'",
)
CARDS_NEED_A_KEY = Rule(
    rule="!has(self.capacity) || !has(self.capacity.cards) || self.capacity.cards == 0"
    " || (has(self.accelerator) && has(self.accelerator.card))",
    message="capacity.cards is set but accelerator.card is not; name the resource key of a whole "
    "card, as in accelerator: {card: nvidia.com/gpu}, or remove capacity.cards",
)


class AcceleratorKeys(ApiModel):
    """Extended resources by which a device plugin offers the accelerator."""

    rules: ClassVar[tuple[Rule, ...]] = (SLICES_TOGETHER,)

    card: ResourceKey | None = None
    """Whole cards."""
    slice_memory: ResourceKey | None = None
    """Percent of the memory of one card; unset: no slices are offered."""
    slice_cores: ResourceKey | None = None
    """Percent of the cores of one card."""


class PerCard(ApiModel):
    """What a Pod gets of the machine with each card; once when it asks for no card."""

    cpu: Quantity | None = None
    """Processor share."""
    memory: Quantity | None = None
    """Memory."""
    extra: Quantities = Field(default_factory=dict)
    """Further resources, by name."""


class Capacity(ApiModel):
    """How much of it there is; for messages, admission is Kueue's."""

    cards: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Whole cards in all; a replica that wants more is refused."""


class InstanceTypeSpec(ApiModel):
    """Queue, accelerator and share of the machine."""

    rules: ClassVar[tuple[Rule, ...]] = (CARDS_NEED_A_KEY,)

    queue_name: Annotated[str, text(63, 1, LABEL_PATTERN)]
    """Kueue LocalQueue, in the namespace of the ModelDeployment, that admits its replicas."""
    accelerator: AcceleratorKeys | None = None
    """How the accelerator is asked for; unset: a type without one."""
    per_card: PerCard = PerCard()
    """CPU and memory for each card."""
    capacity: Capacity | None = None
    """How much of it there is."""
    node_selector: NodeSelector = Field(default_factory=dict)
    """Labels that the nodes must have; Kueue's flavors add theirs."""
    tolerations: Tolerations = ()
    """Taints of nodes that do not keep replicas away."""


class InstanceTypeStatus(ApiModel):
    """Who uses it."""

    observed_generation: Annotated[int, node(format="int64")] = 0
    """Generation of the spec that this status is about."""
    conditions: Conditions = ()
    """Ready."""


class InstanceType(ApiModel):
    """
    A share of a machine with a name: queue, accelerator, CPU and memory per card.

    An edit is an edit of every role that names it: replicas are replaced one at a time.
    """

    api_version: str = API_VERSION
    kind: str = "InstanceType"
    metadata: ObjectMeta = ObjectMeta()
    spec: InstanceTypeSpec
    """Queue, accelerator and share of the machine."""
    status: InstanceTypeStatus | None = None
    """Who uses it."""

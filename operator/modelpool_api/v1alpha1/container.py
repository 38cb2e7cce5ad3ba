"""Parts of a Pod that several kinds let people write."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from ..meta import (
    ApiModel,
    OpenObject,
    Quantity,
    Rule,
    ServiceName,
    list_map,
    listing,
    node,
    text,
)

Word = Annotated[str, text(8192)]
"""One argument of a command."""
Command = Annotated[tuple[Word, ...], listing(most=256)]
Image = Annotated[str, text(512, 1)]
Quantities = Annotated[dict[str, Quantity], node(maxProperties=32)]
NodeSelector = Annotated[dict[str, Annotated[str, text(63)]], node(maxProperties=32)]


class Profile(StrEnum):
    """Engines whose probes, stop sequence and number of slots are known."""

    LLAMA_SERVER = "llama-server"
    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"
    GENERIC = "generic"


class PullPolicy(StrEnum):
    """When the image is fetched."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ResourceAmounts(ApiModel):
    """What a container asks for and may use at most."""

    limits: Quantities = Field(default_factory=dict)
    """Most it may use. Accelerators go here: `nvidia.com/gpu: 1`."""
    requests: Quantities = Field(default_factory=dict)
    """What must be free on the node; as in limits where unset."""


ENV_ONE_SOURCE = Rule(
    rule="!(has(self.value) && has(self.valueFrom))",
    message="an entry of env has value and valueFrom; keep one of them",
    shown="'variable \"' + self.name + '\" has value and valueFrom; keep one of them'",
)


class EnvVar(ApiModel):
    """One environment variable."""

    rules: ClassVar[tuple[Rule, ...]] = (ENV_ONE_SOURCE,)

    name: Annotated[str, text(253, 1, "^[^=]+$")]
    """Name of the variable."""
    value: Annotated[str, text(32768)] | None = None
    """Its value."""
    value_from: OpenObject | None = None
    """Where to take the value from: a Secret, a ConfigMap or a field of the Pod."""


class Toleration(ApiModel):
    """A taint of nodes that does not keep the Pod away."""

    key: Annotated[str, text(316)] | None = None
    """Taint key; unset with operator Exists: every taint."""
    operator: Annotated[str, node(enum=["Exists", "Equal"])] | None = None
    """Exists or Equal (unset)."""
    value: Annotated[str, text(63)] | None = None
    """Taint value for Equal."""
    effect: Annotated[str, node(enum=["NoSchedule", "PreferNoSchedule", "NoExecute"])] | None = None
    """Effect to tolerate; unset: all."""
    toleration_seconds: Annotated[int, node(format="int64")] | None = None
    """How long a NoExecute taint is tolerated."""


class LocalName(ApiModel):
    """Name of an object in the same namespace."""

    name: ServiceName
    """Its name."""


Env = Annotated[tuple[EnvVar, ...], list_map("name", most=128)]
Tolerations = Annotated[tuple[Toleration, ...], listing(most=32)]
PullSecrets = Annotated[tuple[LocalName, ...], list_map("name", most=32)]

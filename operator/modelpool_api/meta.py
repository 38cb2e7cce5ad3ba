"""
What every kind has: metadata, conditions, durations and quantities as strings.

The markers in `Annotated` types (`MaxLen`, `ListMap`, `Rule` ...) say how a value is bounded in a
CRD; `schema` reads them. Python-side validation is lenient on purpose: the API server has
validated before we read, and a stored object must never crash a controller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

DURATION_PATTERN = "^([0-9]{1,5}(h|ms|s|m)){1,4}$"
"""Gateway API subset (GEP-2257) of Go durations: no sign, no fraction, at most four parts."""
DURATION_FORM = "write it like 300s, 4m30s, 1h or 500ms"
QUANTITY_PATTERN = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)
LABEL_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""DNS label, as RFC 1123 has it."""
SUBDOMAIN_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
MODEL_NAME_PATTERN = "^[^ \\t\\r\\n]+$"

_DURATION = re.compile(DURATION_PATTERN)
_PARTS = re.compile("([0-9]+)(h|ms|s|m)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def seconds(text: str) -> float:
    """
    Return the length of a duration of the API in seconds.

    Raises:
        ValueError: *text* is not one; says how to write it.
    """
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; {DURATION_FORM}")
    return sum(int(number) * _SECONDS[unit] for number, unit in _PARTS.findall(text))


def duration_text(value_s: float) -> str:
    """Return *value_s* seconds as the API writes durations, rounded to milliseconds."""
    whole_ms = max(0, round(value_s * 1000))
    parts = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        number, whole_ms = divmod(whole_ms, size)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


@dataclass(frozen=True, slots=True)
class Rule:
    """
    One CEL rule of the API server (``x-kubernetes-validations``).

    Keep to the common core of CEL: what `cel-python` evaluates too, so that every rule is tested
    with an example that passes and one that does not.
    """

    rule: str
    message: str
    """What is wrong and the way out, when `shown` cannot be used."""
    shown: str = ""
    """CEL expression of the message, with the offending value in it."""
    at: str = ""
    """Path of the field, from where the rule stands: ``.default``."""


def first_culprit(items: str, item: str, fault: str, says: str) -> str:
    """
    Return CEL for the message about the first of the list *items* for which *fault* holds.

    *fault* and *says* are CEL about the variable *item*. Each item's message is made first and the
    right one is picked then, because the server knows how long the strings of a list's items can
    be, but not of those that a filter has let through, and refuses to join what has no bound.
    """
    return f"{items}.map({item}, {fault} ? {says} : '').filter(text, text != '')[0]"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """How a value is bounded in a CRD, beyond what its Python type says."""

    schema: dict[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


def node(*rules: Rule, **schema: Any) -> Node:
    """Return a marker for `Annotated`: schema keys as in JSON, and rules."""
    return Node(schema, rules)


def list_map(*keys: str, most: int, least: int = 0, rules: Sequence[Rule] = ()) -> Node:
    """Return the marker of a list whose items are told apart by *keys*, for sane merging."""
    schema: dict[str, Any] = {
        "maxItems": most,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": list(keys),
    }
    if least:
        schema["minItems"] = least
    return Node(schema, tuple(rules))


def listing(*, most: int, least: int = 0, unique: bool = False) -> Node:
    """Return the marker of an ordinary list; *unique* makes it a set."""
    schema: dict[str, Any] = {"maxItems": most}
    if least:
        schema["minItems"] = least
    schema["x-kubernetes-list-type"] = "set" if unique else "atomic"
    return Node(schema)


def text(most: int, least: int = 0, pattern: str = "", **schema: Any) -> Node:
    """Return the marker of a string of *least* to *most* characters."""
    bounds: dict[str, Any] = {"maxLength": most}
    if least:
        bounds["minLength"] = least
    if pattern:
        bounds["pattern"] = pattern
    return Node({**bounds, **schema})


def duration_rules(least: str, most: str, *, word: str = "") -> tuple[Rule, ...]:
    """
    Return the rules of a duration from *least* to *most*, or the *word* alone.

    A pattern in the schema would do, but its message tells nobody the way out.
    """
    also = f"self == '{word}' || " if word else ""
    or_word = f", or {word}" if word else ""
    form = f"self.matches('{DURATION_PATTERN}')"
    return (
        Rule(
            rule=f"{also}{form}",
            message=f"must be a duration without sign; {DURATION_FORM}{or_word}",
            shown=f"'\"' + self + '\" is not a duration; {DURATION_FORM}{or_word}'",
        ),
        Rule(
            rule=f"{also}!{form} || (duration(self) >= duration('{least}')"
            f" && duration(self) <= duration('{most}'))",
            message=f"must be from {least} to {most}",
            shown=f"'\"' + self + '\" is out of bounds; use {least} to {most}{or_word}'",
        ),
    )


def duration(least: str = "0s", most: str = "24h", *, word: str = "") -> Node:
    """Return the marker of a duration; see `duration_rules`."""
    return Node({"maxLength": 32}, duration_rules(least, most, word=word))


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    Node({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 32}),
]
"""Amount of a resource: ``1``, ``500m``, ``16Gi``."""
Label = Annotated[str, text(63, 1, LABEL_PATTERN)]
"""DNS label."""
ObjectName = Annotated[str, text(253, 1, SUBDOMAIN_PATTERN)]
"""Name of another object."""
ServiceName = Annotated[str, text(63, 1, LABEL_PATTERN)]
ModelName = Annotated[str, text(200, 1, MODEL_NAME_PATTERN)]
"""A name that clients put into ``model``."""
Message = Annotated[str, text(32768)]
Timestamp = Annotated[str, Node({"format": "date-time", "maxLength": 64})]
Port = Annotated[int, Field(ge=1, le=65535)]
OpenObject = Annotated[
    dict[str, Any], Node({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]
"""An object of Kubernetes that we pass on as it is; the API server checks it where it lands."""
StringMap = Annotated[
    dict[str, Annotated[str, text(253)]],
    Node({"maxProperties": 64}),
]


class ApiModel(BaseModel):
    """One level of an object: camelCase outside, snake_case inside, unknown fields ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )

    def wire(self) -> dict[str, Any]:
        """Return it as JSON for the API server: without what is unset."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


class OwnerReference(ApiModel):
    """Who an object belongs to."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False
    block_owner_deletion: bool | None = None


class ObjectMeta(ApiModel):
    """The part of metadata that decisions look at."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @property
    def is_going(self) -> bool:
        """True when somebody asked to delete it."""
        return self.deletion_timestamp is not None

    @property
    def controller(self) -> OwnerReference | None:
        """The one owner that manages it, if there is one."""
        return next((owner for owner in self.owner_references if owner.controller), None)


class Status(StrEnum):
    """The three answers of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"

    @classmethod
    def of(cls, answer: bool) -> Status:
        """Return the status that says *answer*."""
        return cls.TRUE if answer else cls.FALSE


class Condition(ApiModel):
    """One aspect of the state of an object, for people and for tools that wait."""

    type: Annotated[str, text(316, 1)]
    """Aspect."""
    status: Annotated[Status, node()]
    """True, False or Unknown."""
    reason: Annotated[str, text(1024, 1, "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one word for programs."""
    message: Message = ""
    """Why, as a sentence for people, with the way out."""
    last_transition_time: Timestamp = ""
    """When status last changed."""
    observed_generation: int = 0
    """Generation of the spec that this is about."""


Conditions = Annotated[tuple[Condition, ...], list_map("type", most=16)]


def timestamp(at: datetime) -> str:
    """Return *at*, which must be aware, as Kubernetes writes times: UTC, whole seconds."""
    if at.tzinfo is None:
        raise ValueError("a time without a zone cannot be written for others")
    offset = at.utcoffset()
    assert offset is not None
    return (at.replace(tzinfo=None) - offset).strftime("%Y-%m-%dT%H:%M:%SZ")


def set_condition(
    conditions: Sequence[Condition],
    kind: str,
    status: Status | bool,
    reason: str,
    message: str = "",
    *,
    now: datetime,
    generation: int,
) -> tuple[Condition, ...]:
    """
    Return *conditions* with the one of type *kind* set; the order of the others is kept.

    The transition time moves only with the status, not with reason or message, so that "since
    when" stays true and an unchanged state causes no write.
    """
    wanted = status if isinstance(status, Status) else Status.of(status)
    before = condition(conditions, kind)
    since = timestamp(now)
    if before is not None and before.status == wanted and before.last_transition_time:
        since = before.last_transition_time
    after = Condition(
        type=kind,
        status=wanted,
        reason=reason,
        message=message,
        last_transition_time=since,
        observed_generation=generation,
    )
    if before is None:
        return (*conditions, after)
    return tuple(after if each.type == kind else each for each in conditions)


def condition(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """Return the condition of type *kind*, or None."""
    return next((each for each in conditions if each.type == kind), None)

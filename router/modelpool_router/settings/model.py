"""
Every setting of the router: name, type, range, default, and the reason of the default.

Attributes are snake_case and carry their unit (``swap_budget_s``, ``max_body_bytes``); the file
has them in camelCase without the unit of durations (``swapBudget``). The reference page and the
JSON Schema are made from this file. Reading a file, and what is checked between settings, is in
`loading` and `rules`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic.alias_generators import to_camel

from ..core.spec import Bounds, MemberName, MemberSpec, PoolName, PoolSpec
from .units import (
    Address,
    AddressField,
    AddressOrOff,
    Duration,
    ModelName,
    ObjectNameField,
    OptionalPath,
    PathField,
    PoolNameField,
    Size,
    Word,
    Written,
    refuse,
    shown,
)

if TYPE_CHECKING:
    from .source import Source

_PLAIN = re.compile(r"[A-Za-z/._-][A-Za-z0-9/._=-]*")
"""Words that need no quotes in YAML."""
KIB, MIB, GIB = 1024, 1024**2, 1024**3


class Profile(StrEnum):
    """Engines whose probes, stop sequence and number of slots are known."""

    LLAMA_SERVER = "llama-server"
    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"
    GENERIC = "generic"


PARALLEL_BY_PROFILE = {Profile.VLLM: 256}
"""vLLM batches by itself; llama-server reports its slots when it is up."""
PARALLEL_OTHERWISE = 16
HEALTH_INTERVAL_S = 2.0
LOOKS_UNTIL_HUNG = 3
"""One probe that is late proves nothing; of two settings that are bound so one may be left out."""


class HoldKeepalive(StrEnum):
    """What a held client of a streamed request gets to hear."""

    NONE = "none"
    COMMENT = "comment"
    CHUNK = "chunk"


class LogFormat(StrEnum):
    """How log lines look."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """Least important line that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def yaml_name(attribute: str) -> str:
    """Return the name in a file of a Python attribute: ``swap_budget_s`` is ``swapBudget``."""
    return to_camel(attribute.removesuffix("_s"))


class Section(BaseModel):
    """
    One level of the configuration; frozen, and strict about names.

    Attributes have docstrings; `shape.prose_of` reads them. pydantic could, but would do so at
    every start.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=yaml_name,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
    )


class SecretSource(Section):
    """
    Where a secret is to be read; the secret itself never stands in the configuration.

    Exactly one of the two is given.
    """

    file: OptionalPath = None
    """File that holds the secret, because files can have owners and be mounted; relative to the
    folder of the configuration file."""
    env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the secret, for containers and services that are given
    them so."""


def _secret_source(value: object) -> object:
    if isinstance(value, str):
        # Not shown: it is most likely the secret.
        raise refuse(
            "a secret must not stand in the configuration",
            "put it into a file and write {file: PATH}, or into a variable and write {env: NAME}",
        )
    if isinstance(value, dict) and len([key for key in value if key in ("file", "env")]) != 1:
        raise refuse("exactly one of file and env is needed", "write {file: PATH} or {env: NAME}")
    return value


Secret = Annotated[SecretSource | None, BeforeValidator(_secret_source)]


def _command(value: object) -> object:
    if isinstance(value, str):
        raise refuse(
            "a command is a list, not one string",
            f"write each argument as an item: {_as_items(value)}",
        )
    if isinstance(value, list | tuple) and not value:
        raise refuse("the command is empty", "name the program to start as its first item")
    if isinstance(value, list | tuple) and value[0] == "":
        raise refuse("the program has no name", "name the program to start as the first item")
    return value


def _as_items(command: str) -> str:
    """Return *command*, written for a shell, as a YAML list."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return "[" + ", ".join(w if _PLAIN.fullmatch(w) else json.dumps(w) for w in words) + "]"


def _as_tuple(value: object) -> object:
    if isinstance(value, str | int | float):
        raise refuse(f"{shown(value)} is not a list", f"put it in brackets: [{value}]")
    return value


Command = Annotated[tuple[Word, ...], BeforeValidator(_command)]
OptionalCommand = Annotated[
    tuple[Word, ...] | None,
    BeforeValidator(_command),
]
Names = Annotated[tuple[ModelName, ...], BeforeValidator(_as_tuple)]


def _url(value: object) -> str:
    form = "write it like http://10.0.0.7:8080 or https://example.org/prefix"
    if not isinstance(value, str) or any(c.isspace() or not c.isprintable() for c in value):
        raise refuse(f"{shown(value)} is not an address", form)
    try:
        parts = urlsplit(value)
        port_is_valid = parts.port != 0
    except ValueError:
        raise refuse(f"{shown(value)} is not an address", form) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise refuse(f"{shown(value)} is not an http or https address", form)
    if parts.username is not None or parts.password is not None:
        raise refuse("the address holds a user or password", "use apiKey: {file: PATH} instead")
    if parts.query or parts.fragment:
        raise refuse("the address has a query or a fragment", "end it before ? and #")
    return value.rstrip("/")


def _origin(value: object) -> str:
    form = 'write origins like https://chat.example.org or http://localhost:3000, or "*" for all'
    if value == "*":
        return "*"
    if not isinstance(value, str) or _url(value) != value or value.count("/") != 2:
        raise refuse(f"{shown(value)} is not an origin", form)
    return value.lower()


Url = Annotated[str, BeforeValidator(_url), Written((("type", "string"),), "http(s) address")]
Origin = Annotated[str, BeforeValidator(_origin), Written((("type", "string"),), "origin")]


def _probe_path(value: object) -> object:
    if value is None or (isinstance(value, str) and value.startswith("/") and value.isprintable()):
        if value is None or " " not in value:
            return value
    raise refuse(f"{shown(value)} is not the path of a probe", "begin it with /, as in /health")


ProbePath = Annotated[
    str | None, BeforeValidator(_probe_path), Written((("type", "string"),), "path on the member")
]
Limit = Annotated[int, Field(ge=1, le=1_000_000)]


class KubernetesObject(Section):
    """The object of Kubernetes that runs a member; the router scales it between 0 and 1."""

    namespace: ObjectNameField
    """Namespace of the object; the router needs rights in it."""
    name: ObjectNameField
    """Name of the object; the pool alone scales it, so nothing else should."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the container that answers; unset: the first one that it declares."""
    service: ObjectNameField | None = None
    """Service of the same namespace that requests go to; unset: straight to the Pod, which needs no
    Service and never reaches an old one."""


OBJECT_KINDS = {
    "deployment": "Deployment",
    "stateful_set": "StatefulSet",
    "inference_service": "InferenceService",
    "model_deployment": "ModelDeployment",
}
"""Attributes of a member that name an object of Kubernetes, and the kind of it."""


class Member(Section):
    """One model service of a pool: how to start it, ask it and stop it."""

    name: ModelName
    """Name that clients use in `model`; unique over all members and upstreams, aliases included."""
    models: Names = ()
    """Further names that clients may use, so that programs with built-in model names work."""
    profile: Profile = Profile.GENERIC
    """Engine, which decides the probes, the stop sequence and `parallel`; generic assumes the
    least."""
    command: OptionalCommand = None
    """Program and arguments, each an item; `{port}` and `{member}` are replaced. A relative
    program path counts from `workingDirectory`. Needed, unless the member is an object of
    Kubernetes."""
    deployment: KubernetesObject | None = None
    """Deployment that runs the member, instead of a command; its strategy must be Recreate."""
    stateful_set: KubernetesObject | None = None
    """StatefulSet that runs the member."""
    inference_service: KubernetesObject | None = None
    """InferenceService that runs the member."""
    model_deployment: KubernetesObject | None = None
    """ModelDeployment that runs the member."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on 127.0.0.1 that the command listens on; unset: a free one is chosen at each load
    and put in place of `{port}`, so that nothing collides."""
    env: dict[str, Word] = Field(default_factory=dict)
    """Environment variables on top of the router's own."""
    working_directory: OptionalPath = None
    """Folder the command runs in; unset: the folder of the configuration file, so that it does
    not matter where the router was started."""
    stop_command: OptionalCommand = None
    """Command that is run before the stop signals, for members that a tool such as `docker`
    started."""
    gone_command: OptionalCommand = None
    """Command that must succeed before the member counts as gone, for what is not a child
    process of the router."""
    parallel: int | None = Field(default=None, ge=1, le=100_000)
    """Most requests inside the member at once, the rest is held; unset: what the engine reports,
    else 256 for vllm and 16 for others, because a queue inside the engine is out of reach of
    every rule."""
    expected_load_s: Annotated[float, Duration("10ms", "24h")] = 60.0
    """Load time to assume for Retry-After and turns until one has been measured."""
    served_model: ModelName | None = None
    """Model name that the member itself wants to read; unset: the body is passed on untouched."""
    readiness_path: ProbePath = None
    """Path that answers 200 when the member can serve; unset: the profile's, `/health` for
    generic."""
    idle_path: ProbePath = None
    """Path that answers 2xx when the member works on nothing and another status, such as 503, when
    it does; unset: the profile's probe, none for generic, where the router's own count decides."""
    stop_grace_s: Annotated[float | None, Duration("0s", "1h", "auto")] = None
    """Time from the first TERM to the second; auto: the profile's. A busy llama-server leaves
    only at the second."""
    kill_grace_s: Annotated[float | None, Duration("0s", "1h", "auto")] = None
    """Time from the second TERM to KILL; auto: the profile's."""
    log_file: OptionalPath = None
    """File for the output of the member; unset: one per member in `stateDir`."""
    memory_needed_bytes: Annotated[int | None, Size(0, 2**50)] = None
    """Accelerator memory that must be free before this member starts, as `memorySettle` measures
    it; unset: as much as when the slot was last empty."""

    @property
    def kubernetes(self) -> tuple[str, KubernetesObject] | None:
        """Kind and place of the object that runs it; None for a local process."""
        for attribute, kind in OBJECT_KINDS.items():
            found = getattr(self, attribute)
            if found is not None:
                return kind, found
        return None

    @property
    def has_idle_probe(self) -> bool:
        """True when the engine can be asked whether it is idle."""
        return self.profile is not Profile.GENERIC or self.idle_path is not None

    def spec(self, *, load_timeout_s: float = math.inf) -> MemberSpec:
        """Return what the scheduler must know of this member; no load outlasts *load_timeout_s*."""
        return MemberSpec(
            name=MemberName(self.name),
            parallel=self.parallel or PARALLEL_BY_PROFILE.get(self.profile, PARALLEL_OTHERWISE),
            parallel_is_fixed=self.parallel is not None,
            expected_load_s=min(self.expected_load_s, load_timeout_s),
            has_idle_probe=self.has_idle_probe,
        )


class MemorySettle(Section):
    """Wait before a load until the accelerator has really given back the memory of the last
    member."""

    command: Command
    """Command that prints the free memory in MiB, as `nvidia-smi --query-gpu=memory.free
    --format=csv,noheader,nounits` does; the smallest number counts."""
    timeout_s: Annotated[float, Duration("0s", "1h")] = 30.0
    """Longest wait. Then a member that says what it needs (`memoryNeededBytes`) has failed to
    load, so that it cannot crash half way; others are started anyway, because a number that never
    settles must not stop the pool."""
    interval_s: Annotated[float, Duration("10ms", "1m")] = 0.5
    """Time between two looks; drivers give memory back within seconds."""


class Pool(Section):
    """One exclusive slot and the members that take turns on it."""

    name: PoolNameField
    """Name in addresses, metrics and file names; unique."""
    members: Annotated[tuple[Member, ...], BeforeValidator(_as_tuple)] = Field(min_length=1)
    """The members; their order breaks ties."""
    default: ModelName | None = None
    """Member that is warmed when the pool is cold and nobody waits; unset: the pool stays empty
    until the first request."""
    swap_budget_s: Annotated[float, Duration("0s", "24h")] = 300.0
    """Longest hold of a request, from its arrival; then 503 with Retry-After. 300 s because most
    clients wait that long; 0s refuses at once and lets the load go on."""
    max_turn_s: Annotated[float, Duration("0s", "24h")] = 60.0
    """How long newcomers for the resident may overtake those who wait for another member,
    divided by the number of members waited for; 60 s is several answers, and short against
    the budget. 0s = strict order of arrival."""
    linger_s: Annotated[float | None, Duration("0s", "10m", "auto")] = None
    """How long an idle resident is kept after its last answer before another member displaces
    it, which stops ping-pong between people who think between requests; auto: a quarter of
    the measured swap time, at most 2 s."""
    drain_timeout_s: Annotated[float | None, Duration("0s", "24h", "off")] = None
    """Longest drain; then what still runs ends with an error to its clients. Off, because a
    running answer is worth more than a waiting one."""
    load_timeout_s: Annotated[float, Duration("100ms", "24h")] = 600.0
    """Longest load of a member; then it has failed. 10 min, because large models on slow disks
    take minutes."""
    unschedulable_after_s: Annotated[float | None, Duration("1s", "24h", "inherit")] = None
    """How long a Pod may find no node until its load has failed; inherit: `loadTimeout`, because
    node pools need time to grow."""
    max_generation_s: Annotated[float | None, Duration("1s", "168h", "off")] = None
    """Longest answer while somebody waits for another member; off: no bound, and then waiting
    for another member has none either."""
    idle_unload_after_s: Annotated[float | None, Duration("100ms", "8760h", "off")] = None
    """Idle time after which the slot is emptied; off: the resident stays until another member is
    wanted."""
    reclaim_default_after_s: Annotated[float | None, Duration("100ms", "8760h", "off")] = None
    """Idle time after which a resident that is not the default gives way to it; off: nothing
    moves without demand."""
    hung_after_s: Annotated[float, Duration("100ms", "24h")] = 60.0
    """Time for which readiness and idle probes must fail, with no answer progressing, until a
    resident counts as lost and is stopped; of an engine without an idle probe the readiness probe
    alone. 60 s outlasts a long prompt on a busy machine. Unset it is never less than three times
    `healthInterval`."""
    health_interval_s: Annotated[float | None, Duration("10ms", "10m", "auto")] = None
    """Time between two looks at the resident; auto: 2 s, which notices a hung engine early at next
    to no cost, or a third of `hungAfter` if that is less."""
    restore: bool = True
    """Whether the last good resident is loaded again when the member that displaced it failed
    and nobody waits."""
    response_timeout_s: Annotated[float | None, Duration("10ms", "24h", "inherit")] = None
    """`responseTimeout` of this pool; inherit: the router's."""
    read_stall_s: Annotated[float | None, Duration("10ms", "24h", "inherit")] = None
    """`readStall` of this pool; inherit: the router's."""
    write_stall_s: Annotated[float | None, Duration("10ms", "24h", "inherit")] = None
    """`writeStall` of this pool; inherit: the router's."""
    memory_settle: MemorySettle | None = None
    """Gate between unload and load for drivers that give accelerator memory back late; unset:
    none."""

    @property
    def is_in_kubernetes(self) -> bool:
        """True when its members are objects of Kubernetes."""
        return any(member.kubernetes is not None for member in self.members)

    @property
    def looks_every_s(self) -> float:
        """`healthInterval` in force."""
        if self.health_interval_s is not None:
            return self.health_interval_s
        return min(HEALTH_INTERVAL_S, self.hung_after_s / LOOKS_UNTIL_HUNG)

    @property
    def is_hung_after_s(self) -> float:
        """`hungAfter` in force."""
        if "hung_after_s" in self.model_fields_set:
            return self.hung_after_s
        return max(self.hung_after_s, LOOKS_UNTIL_HUNG * self.looks_every_s)

    def member(self, name: str) -> Member:
        """Return the member called *name*; `KeyError` if there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise KeyError(name)

    def spec(self) -> PoolSpec:
        """Return what the scheduler must know of this pool."""
        return PoolSpec(
            name=PoolName(self.name),
            members={
                MemberName(member.name): member.spec(load_timeout_s=self.load_timeout_s)
                for member in self.members
            },
            default=None if self.default is None else MemberName(self.default),
            swap_budget_s=self.swap_budget_s,
            max_turn_s=self.max_turn_s,
            linger_s=self.linger_s,
            drain_timeout_s=self.drain_timeout_s,
            load_timeout_s=self.load_timeout_s,
            max_generation_s=self.max_generation_s,
            idle_unload_after_s=self.idle_unload_after_s,
            reclaim_default_after_s=self.reclaim_default_after_s,
            hung_after_s=self.is_hung_after_s,
            restore=self.restore,
        )


class Upstream(Section):
    """A service that is always there: never swapped, only routed to by name."""

    name: ModelName
    """Name that clients use in `model`; unique over all members and upstreams, aliases included."""
    models: Names = ()
    """Further names that clients may use."""
    url: Url
    """Where it answers; a path becomes the prefix of every path."""
    api_key: Secret = None
    """Key that the router shows to it as a Bearer token; unset: none. The client's own key is
    never passed on."""
    response_timeout_s: Annotated[float | None, Duration("10ms", "24h", "inherit")] = None
    """`responseTimeout` of this upstream; inherit: the router's."""


class KubernetesAccess(Section):
    """How the API server is reached; inside a Pod nothing has to be said."""

    kubeconfig: OptionalPath = None
    """Kubeconfig file; unset: `KUBECONFIG`, else the account of the Pod, else `~/.kube/config`."""
    context: str | None = Field(default=None, min_length=1)
    """Context of the kubeconfig; unset: its current one."""
    call_timeout_s: Annotated[float, Duration("100ms", "5m")] = 10.0
    """Longest wait for the answer to one call; lists of thousands of objects fit."""


class PoolsFrom(Section):
    """ModelPools of a namespace that are served like pools of this file, and followed as they
    change."""

    namespace: ObjectNameField
    """Their namespace; their Leases and members are there, too."""
    names: Annotated[tuple[ObjectNameField, ...], BeforeValidator(_as_tuple)] = ()
    """Names of the ModelPools; empty: all of the namespace."""


def default_state_dir() -> Path:
    """Return the folder for state of this user, as the XDG base directory rules name it."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path("~/.local/state").expanduser()
    return base / "modelpool"


class Settings(Section):
    """The whole configuration of a router."""

    listen: AddressField = Address("127.0.0.1", 8080)
    """Where clients connect; only this machine unless changed, because an open model server on a
    network will be found and used."""
    admin: AddressOrOff = Address("127.0.0.1", 9090)
    """Where metrics and the admin interface answer; a port of its own, so that it is never
    published with the data port. Port 0 chooses a free one."""
    state_dir: PathField = Field(default_factory=default_state_dir)
    """Folder for load estimates, locks, member logs and the traces of orphans, all of which must
    outlive the router."""
    pools: Annotated[tuple[Pool, ...], BeforeValidator(_as_tuple)] = ()
    """The pools; each is one slot."""
    upstreams: Annotated[tuple[Upstream, ...], BeforeValidator(_as_tuple)] = ()
    """Services that are never swapped, reachable under the same address."""

    pools_from: PoolsFrom | None = None
    """ModelPools to serve as well; unset: none."""
    kubernetes: KubernetesAccess | None = None
    """How the API server is reached; unset: as the environment says."""
    lease_namespace: ObjectNameField | None = None
    """Namespace of the Leases `modelpool-<pool>` that say which router may move a slot; unset: the
    router's own. All routers of a pool must name the same."""

    keys: Secret = None
    """Where the client keys are read; unset: no key is asked for, which only loopback addresses
    may do."""
    allow_anonymous: bool = False
    """Whether clients beyond this machine may come without a key; must be said on purpose."""
    admin_token: Secret = None
    """Where the token for changes on the admin port is read; unset: whoever reaches the port may
    change things."""
    cors_origins: Annotated[tuple[Origin, ...], BeforeValidator(_as_tuple)] = ()
    """Web pages whose scripts may call the router; empty: none, so that no page on the Internet
    can use a local router."""
    passthrough: bool = False
    """Whether `/upstream/{member}/{path}` passes any path on to a member; off, because engines
    have paths that change or reveal things."""

    max_held: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Most requests held at once; beyond them 503 queue_full, since each costs a connection and
    its body."""
    max_held_bytes: Annotated[int, Size(0, 2**50)] = 512 * MIB
    """Most bytes of bodies held at once, memory and spool together; beyond them 503 queue_full."""
    max_held_per_key: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Most requests held at once for one key; beyond them 429, so that one client cannot fill
    the queue."""
    max_body_bytes: Annotated[int, Size(1, 16 * GIB)] = 64 * MIB
    """Largest request body, after decompression; beyond it 413. Several large images fit."""
    spool_above_bytes: Annotated[int, Size(0, 16 * GIB)] = 1 * MIB
    """Bodies larger than this wait in an unlinked temporary file instead of memory; ordinary
    chats stay below."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Most client connections at once; further ones are answered 503 and closed. Above `maxHeld`,
    below common file limits."""

    hold_keepalive: HoldKeepalive = HoldKeepalive.NONE
    """What held streamed requests are sent so that their clients do not give up: nothing, SSE
    comments, or chunks with an empty delta (chat completions only); none, because the status
    code is then still open."""
    hold_keepalive_after_s: Annotated[float, Duration("10ms", "1h")] = 10.0
    """Hold time after which `holdKeepalive` begins; most swaps of small models are over by then
    and keep their plain status code."""
    hold_keepalive_interval_s: Annotated[float, Duration("10ms", "1h")] = 10.0
    """Time between two keep-alives; below the 15 s to 60 s after which proxies and clients give
    up."""

    connect_timeout_s: Annotated[float, Duration("10ms", "5m")] = 2.0
    """Longest time to connect to a member or upstream; they are near, and what does not accept
    in 2 s is not there."""
    response_timeout_s: Annotated[float, Duration("10ms", "24h")] = 600.0
    """Longest time from dispatch to the head of the response; then 504. Never counts the hold;
    600 s is what the openai SDK waits."""
    read_stall_s: Annotated[float, Duration("10ms", "24h")] = 300.0
    """Longest silence of a response that has begun; then it ends with an error, so that a hung
    engine frees the slot."""
    write_stall_s: Annotated[float, Duration("10ms", "24h")] = 60.0
    """Longest time for which a client takes no byte of its response; then it is cut off, so that
    a sleeping client does not keep the slot."""

    head_timeout_s: Annotated[float, Duration("10ms", "10m")] = 10.0
    """Longest time from the first byte of a request to the end of its head; then 408."""
    silent_timeout_s: Annotated[float, Duration("10ms", "10m")] = 15.0
    """How long a new connection may send nothing before it is closed."""
    keep_alive_s: Annotated[float, Duration("0s", "1h")] = 75.0
    """How long an idle connection is kept for the next request; longer than the 60 s of common
    proxies, so that they close first."""
    body_stall_s: Annotated[float, Duration("10ms", "1h")] = 30.0
    """Longest pause within a request body; then 408."""
    body_timeout_s: Annotated[float, Duration("10ms", "24h")] = 120.0
    """Longest time for a whole request body; then 408. 64 MiB need 4.5 Mbit/s."""

    shutdown_delay_s: Annotated[float, Duration("0s", "10m")] = 5.0
    """How long connections are still accepted after a stop was asked for, while readiness is
    already false, so that load balancers turn away first."""
    shutdown_timeout_s: Annotated[float, Duration("0s", "1h")] = 30.0
    """How long running answers may go on after a stop was asked for; then they are cut off."""
    reload_poll_s: Annotated[float | None, Duration("10ms", "1h", "off")] = 2.0
    """How often the configuration file is looked at for changes; off: only SIGHUP reloads."""

    log_format: LogFormat = LogFormat.AUTO
    """How log lines look; auto: coloured text on a terminal, JSON otherwise."""
    log_level: LogLevel = LogLevel.INFO
    """Least important line that is logged; info has one line per request and per swap."""

    _source: Source | None = PrivateAttr(default=None)

    @property
    def source(self) -> Source | None:
        """Where each value was written; None when a program built the settings."""
        return self._source

    @property
    def folder(self) -> Path:
        """Absolute folder from which relative paths count: that of the file, or the current one."""
        return Path.cwd() if self._source is None else self._source.folder

    def pool(self, name: str) -> Pool:
        """Return the pool called *name*; `KeyError` if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def pool_specs(self) -> dict[PoolName, PoolSpec]:
        """Return what the schedulers must know, in order of configuration."""
        return {PoolName(pool.name): pool.spec() for pool in self.pools}

    def bounds(self) -> Bounds:
        """Return the limits on what may be held at once."""
        return Bounds(
            max_held=self.max_held,
            max_held_per_key=self.max_held_per_key,
            max_held_bytes=self.max_held_bytes,
        )

"""
A cluster in memory: a `ClusterPort` for reconcilers and drivers, with an API server's manners.

Kept as an API server keeps them: resourceVersions, generations, UIDs, conflicts, finalizers and
deletionTimestamp, graceful deletion of bound Pods, status apart from spec, selectors, the history
that watches and stale reads are served from. Nothing runs by itself: controllers, scheduler and
kubelet are in `memcontrollers` and move when the test says so; time passes when the test says so.

A `MemPort` is one process's door to it. Everything that can go wrong on the way goes wrong there:
refused, lost before or after it was applied, landing late, answered from the past, killed.
What it promises is written down as cases in `portcases`, which a real API
server has to pass as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar, cast

from modelpool_kube import errors
from modelpool_kube.kinds import ACCESS_REVIEWS, DEPLOYMENTS, PODS, STATEFULSETS, Json, Kind, meta
from modelpool_kube.port import Change, Listing, WatchEvent

T = TypeVar("T")
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_OWNED_BY_SERVER = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp")


class Killed(BaseException):
    """The process behind a port was killed; nothing of it may run on."""


def copied(value: T) -> T:
    """Return a deep copy of JSON."""
    return cast(T, _copied(value))


_ATOMS = frozenset({str, int, bool, float, type(None)})


def _copied(value: Any) -> Any:
    # Most of the time of a test in memory is spent here: no call for what needs no copy.
    if isinstance(value, dict):
        return {key: item if type(item) in _ATOMS else _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _ATOMS else _copied(item) for item in value]
    return value


def merged(target: Any, patch: Any) -> Any:
    """Return *target* with a JSON merge patch applied (RFC 7386)."""
    if not isinstance(patch, dict):
        return copied(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@dataclass(frozen=True, slots=True)
class Write:
    """One change of the store, as it happened."""

    version: int
    actor: str
    verb: str
    """``create``, ``patch``, ``status``, ``delete`` (asked for) or ``remove`` (gone)."""
    kind: Kind
    namespace: str
    name: str
    before: Json | None
    after: Json | None
    given: str = ""
    """Version or UID that it was conditional on; empty: none."""

    @property
    def change(self) -> Change:
        """How a watch reports it."""
        if self.after is None:
            return Change.DELETED
        return Change.ADDED if self.before is None else Change.MODIFIED


Admit = Callable[[Json, Json | None], Json]
"""Takes an object as sent and as stored before; returns what is stored, or raises."""


class MemCluster:
    """
    The store and the API server in front of it.

    Methods without underscore that are not async are the test's own hand: no faults, no ports.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.version = 100
        self.writes: list[Write] = []
        """Everything that changed, in order."""
        self.after_write: list[Callable[[Write], None]] = []
        """Called after every change; invariants go here."""
        self.admit: dict[Kind, Admit] = {}
        self.closed_namespaces: set[str] = set()
        """Namespaces that are being deleted: nothing can be created there."""
        self.down = False
        """Whether the API server refuses connections."""
        self.compacted = 0
        """Watches from a version below get Gone."""
        self._objects: dict[Kind, dict[tuple[str, str], Json]] = defaultdict(dict)
        self._history: dict[tuple[Kind, str, str], list[tuple[int, Json | None]]] = defaultdict(
            list
        )
        self._count = 0
        self._time = 0.0
        self._clock = clock
        self._watchers: set[_Watcher] = set()

    # Time

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._time if self._clock is None else self._clock()

    def wall(self) -> datetime:
        """Return the UTC time that belongs to `now`."""
        return _EPOCH + timedelta(seconds=self.now())

    def advance(self, seconds: float) -> None:
        """Let time pass (only without a clock of the test's own)."""
        assert self._clock is None
        self._time += seconds

    # The test's hand

    def port(self, name: str) -> MemPort:
        """Return the door of a process called *name*."""
        return MemPort(self, name)

    def read(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        """Return an object, or None."""
        found = self._objects[kind].get((_ns(kind, namespace), name))
        return None if found is None else copied(found)

    def must(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Return an object that is there."""
        found = self.read(kind, namespace, name)
        assert found is not None, f"{kind.kind} {name} is missing"
        return found

    def all(self, kind: Kind, namespace: str | None = None, labels: str = "") -> list[Json]:
        """Return all objects of *kind*, in order of their names."""
        return [
            copied(obj)
            for (where, _), obj in sorted(self._objects[kind].items())
            if (namespace is None or not kind.namespaced or where == namespace)
            and matches(obj, labels=labels)
        ]

    def names(self, kind: Kind, namespace: str | None = None) -> list[str]:
        """Return the names of all objects of *kind*."""
        return [obj["metadata"]["name"] for obj in self.all(kind, namespace)]

    def put(self, kind: Kind, namespace: str | None, body: Json, *, actor: str = "test") -> Json:
        """Create an object; a status in *body* is kept."""
        made = self._create(
            kind, namespace, {k: v for k, v in body.items() if k != "status"}, actor
        )
        if "status" in body:
            made = self._patch(
                kind,
                namespace,
                made["metadata"]["name"],
                {"status": body["status"]},
                None,
                actor,
                status=True,
            )
        return made

    def edit(
        self, kind: Kind, namespace: str | None, name: str, patch: Json, *, actor: str = "test"
    ) -> Json:
        """Merge into spec, metadata and whatever is not status."""
        return self._patch(kind, namespace, name, patch, None, actor)

    def edit_status(
        self, kind: Kind, namespace: str | None, name: str, status: Json, *, actor: str = "test"
    ) -> Json:
        """Merge into the status."""
        return self._patch(kind, namespace, name, {"status": status}, None, actor, status=True)

    def set_unchecked(
        self, kind: Kind, namespace: str | None, name: str, patch: Json, *, actor: str = "test"
    ) -> Json:
        """Merge into anything at all, as a component with a subresource of its own may."""
        before = self._existing(kind, namespace, name)
        return self._store("patch", kind, namespace, name, before, merged(before, patch), actor)

    def remove(self, kind: Kind, namespace: str | None, name: str, *, actor: str = "test") -> None:
        """Ask for an object to be deleted."""
        self._delete(kind, namespace, name, actor)

    def vanish(self, kind: Kind, namespace: str | None, name: str, *, actor: str = "test") -> None:
        """Take an object out of the store, whatever holds it (etcd surgery, a lost Lease)."""
        before = self._existing(kind, namespace, name)
        self._store("remove", kind, namespace, name, before, None, actor)

    def as_of(self, version: int, kind: Kind, namespace: str | None, name: str) -> Json | None:
        """Return an object as it was at *version*."""
        found: Json | None = None
        for at, obj in self._history[(kind, _ns(kind, namespace), name)]:
            if at > version:
                break
            found = obj
        return None if found is None else copied(found)

    def compact(self) -> None:
        """Forget the past: watches that begin in it get Gone."""
        self.compacted = self.version

    def bookmark(self) -> None:
        """Tell all watches the current version."""
        for watcher in self._watchers:
            watcher.add(WatchEvent(Change.BOOKMARK, {"metadata": _version_meta(self.version)}))

    def end_watches(self) -> None:
        """End all watches, as a server that reaches its time limit does."""
        for watcher in list(self._watchers):
            watcher.end(None)

    def break_watches(self, error: errors.KubeError | None = None) -> None:
        """End all watches with an error."""
        for watcher in list(self._watchers):
            watcher.end(error or errors.Unavailable("connection lost"))

    @property
    def watching(self) -> int:
        """How many watches are open."""
        return len(self._watchers)

    # The API server

    def _existing(self, kind: Kind, namespace: str | None, name: str) -> Json:
        found = self._objects[kind].get((_ns(kind, namespace), name))
        if found is None:
            raise errors.NotFound(f'{kind.plural} "{name}" not found', code=404, reason="NotFound")
        return found

    def _list(self, kind: Kind, namespace: str | None, labels: str, fields: str) -> list[Json]:
        return [
            copied(obj)
            for (where, _), obj in sorted(self._objects[kind].items())
            if (namespace is None or not kind.namespaced or where == namespace)
            and matches(obj, labels=labels, fields=fields)
        ]

    def _list_as_of(
        self, version: int, kind: Kind, namespace: str | None, labels: str, fields: str
    ) -> list[Json]:
        found = []
        for each, where, name in sorted(
            (key for key in self._history if key[0] == kind), key=lambda key: key[1:]
        ):
            obj = self.as_of(version, each, where, name)
            in_scope = namespace is None or not kind.namespaced or where == namespace
            if obj is not None and in_scope and matches(obj, labels=labels, fields=fields):
                found.append(obj)
        return found

    def _create(self, kind: Kind, namespace: str | None, body: Json, actor: str) -> Json:
        where = _ns(kind, namespace)
        given = meta(body)
        if kind.namespaced and not where:
            raise errors.Invalid("an empty namespace may not be set", code=422, reason="Invalid")
        if given.get("namespace", where) != where:
            raise errors.Invalid("the namespace does not match", code=400, reason="BadRequest")
        if given.get("resourceVersion"):
            raise errors.Unanswered(  # an API server answers 500 to this
                "resourceVersion should not be set on objects to be created", code=500
            )
        if where in self.closed_namespaces:
            raise errors.Forbidden(
                f"unable to create new content in namespace {where} because it is being terminated",
                code=403,
                reason="Forbidden",
            )
        self._count += 1
        name = given.get("name")
        if kind == ACCESS_REVIEWS:
            if given:
                raise errors.Invalid("metadata: must be empty", code=422, reason="Invalid")
            name = f"review-{self._count}"  # answered, not stored; here it is seen among the writes
        if not name:
            if not given.get("generateName"):
                raise errors.Invalid("name or generateName is required", code=422, reason="Invalid")
            name = f"{given['generateName']}{self._count:05d}"
        if (where, name) in self._objects[kind]:
            raise errors.AlreadyExists(
                f'{kind.plural} "{name}" already exists', code=409, reason="AlreadyExists"
            )
        stored: Json = copied(body)
        stored["apiVersion"], stored["kind"] = kind.api_version, kind.kind
        if kind.has_status:
            stored.pop("status", None)
        stored["metadata"] = {
            **{k: v for k, v in stored.get("metadata", {}).items() if k != "deletionTimestamp"},
            "name": name,
            "uid": f"uid-{self._count}",
            "creationTimestamp": self._stamp(),
        }
        if kind.namespaced:
            stored["metadata"]["namespace"] = where
        stored = self._admitted(kind, _with_defaults(kind, stored), None)
        if kind.has_status:
            stored["metadata"]["generation"] = 1
        return self._store("create", kind, namespace, name, None, stored, actor)

    def _patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        version: str | None,
        actor: str,
        *,
        status: bool = False,
    ) -> Json:
        before = self._existing(kind, namespace, name)
        asked = patch.get("metadata") or {}
        wanted = version if version is not None else asked.get("resourceVersion")
        given = wanted or ""
        if wanted is not None and wanted != before["metadata"]["resourceVersion"]:
            raise errors.Conflict(
                "the object has been modified; please apply your changes to the latest version",
                code=409,
                reason="Conflict",
            )
        if status:
            if not kind.has_status:
                raise errors.NotServed("the server could not find the requested resource", code=404)
            after = {**before, "status": merged(before.get("status"), patch.get("status"))}
            if not after["status"]:
                after.pop("status")
            return self._store("status", kind, namespace, name, before, after, actor, given)
        after = copied(merged(before, patch))  # what was not patched is shared otherwise
        for key in _OWNED_BY_SERVER:
            if after["metadata"].get(key) != before["metadata"].get(key):
                raise errors.Invalid(
                    f"metadata.{key}: field is immutable", code=422, reason="Invalid"
                )
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        after["metadata"].pop("generation", None)
        if "generation" in before["metadata"]:
            after["metadata"]["generation"] = before["metadata"]["generation"]
        if kind.has_status:
            after.pop("status", None)
            if "status" in before:
                after["status"] = before["status"]
        if before["metadata"].get("deletionTimestamp"):
            added = set(_finalizers(after)) - set(_finalizers(before))
            if added:
                raise errors.Forbidden(
                    "no new finalizers can be added if the object is being deleted", code=403
                )
        _check_pod(kind, before, after)
        after = self._admitted(kind, _with_defaults(kind, after), before)
        if kind.has_status and _content(kind, after) != _content(kind, before):
            after["metadata"]["generation"] = before["metadata"]["generation"] + 1
        if (
            before["metadata"].get("deletionTimestamp")
            and not _finalizers(after)
            and not _waits_for_kubelet(kind, after)
        ):
            return self._store("remove", kind, namespace, name, before, None, actor, given)
        return self._store("patch", kind, namespace, name, before, after, actor, given)

    def _delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        actor: str,
        *,
        uid: str | None = None,
        version: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        before = self._existing(kind, namespace, name)
        now = before["metadata"]
        if (uid is not None and uid != now["uid"]) or (
            version is not None and version != now["resourceVersion"]
        ):
            raise errors.Conflict("precondition failed", code=409, reason="Conflict")
        given = uid or version or ""
        after = copied(before)
        grace = 0
        if kind == PODS and before.get("spec", {}).get("nodeName"):
            phase = before.get("status", {}).get("phase")
            if phase not in ("Succeeded", "Failed"):
                default = before["spec"].get("terminationGracePeriodSeconds", 30)
                grace = default if grace_s is None else grace_s
        if now.get("deletionTimestamp"):
            # Asked for before; only a shorter grace makes a difference.
            if grace >= now.get("deletionGracePeriodSeconds", 0):
                return
            after["metadata"]["deletionGracePeriodSeconds"] = grace
        else:
            after["metadata"]["deletionTimestamp"] = self._stamp()
            after["metadata"]["deletionGracePeriodSeconds"] = grace
            if "generation" in now:
                after["metadata"]["generation"] = now["generation"] + 1
        if _finalizers(after) or _waits_for_kubelet(kind, after):
            self._store("delete", kind, namespace, name, before, after, actor, given)
        else:
            self._store("remove", kind, namespace, name, before, None, actor, given)

    def _admitted(self, kind: Kind, obj: Json, before: Json | None) -> Json:
        admit = self.admit.get(kind)
        return obj if admit is None else admit(obj, before)

    def _store(
        self,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str,
        before: Json | None,
        after: Json | None,
        actor: str,
        given: str = "",
    ) -> Json:
        if after is not None and after == before:
            return copied(after)  # as an API server, which writes nothing then
        self.version += 1
        where = _ns(kind, namespace)
        if after is not None:
            after = copied(after)
            after["metadata"]["resourceVersion"] = str(self.version)
            self._objects[kind][where, name] = after
        else:
            del self._objects[kind][where, name]
        self._history[kind, where, name].append((self.version, after))
        write = Write(self.version, actor, verb, kind, where, name, before, after, given)
        self.writes.append(write)
        for watcher in self._watchers:
            watcher.see(write)
        for check in self.after_write:
            check(write)
        last = before if after is None else after
        assert last is not None
        return copied(last)

    def _stamp(self) -> str:
        return self.wall().strftime("%Y-%m-%dT%H:%M:%SZ")


def _ns(kind: Kind, namespace: str | None) -> str:
    return (namespace or "") if kind.namespaced else ""


def _version_meta(version: int) -> Json:
    return {"resourceVersion": str(version)}


def _finalizers(obj: Json) -> list[str]:
    return obj["metadata"].get("finalizers") or []


def _content(kind: Kind, obj: Json) -> Json:
    """Return what the generation counts the changes of."""
    content = {key: value for key, value in obj.items() if key not in ("metadata", "status")}
    if kind == DEPLOYMENTS:
        content["annotations"] = obj["metadata"].get("annotations") or {}
    return content


def _waits_for_kubelet(kind: Kind, obj: Json) -> bool:
    return kind == PODS and obj["metadata"].get("deletionGracePeriodSeconds", 0) > 0


def _with_defaults(kind: Kind, obj: Json) -> Json:
    """Fill in what the API server fills in, as far as somebody here reads it."""
    spec = obj.get("spec")
    if not isinstance(spec, dict):
        return obj
    if kind == DEPLOYMENTS:
        spec = {"replicas": 1, "strategy": {"type": "RollingUpdate"}, **spec}
    elif kind == STATEFULSETS:
        spec = {"replicas": 1, "updateStrategy": {"type": "RollingUpdate"}, **spec}
    elif kind == PODS:
        spec = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30, **spec}
        return {"status": {"phase": "Pending"}, **obj, "spec": spec}
    return {**obj, "spec": spec}


def _check_pod(kind: Kind, before: Json, after: Json) -> None:
    if kind != PODS:
        return
    gates = [gate["name"] for gate in before["spec"].get("schedulingGates") or []]
    for gate in after["spec"].get("schedulingGates") or []:
        if gate["name"] not in gates:
            raise errors.Invalid("spec.schedulingGates: only deletion is allowed", code=422)
    if before["spec"].get("nodeName") != after["spec"].get("nodeName"):
        raise errors.Invalid("spec.nodeName: pods are bound by binding", code=422)


# Selectors

_IN = re.compile(r"\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*")


def matches(obj: Json, *, labels: str = "", fields: str = "") -> bool:
    """Return whether *obj* is selected by label and field selectors as kubectl writes them."""
    return all(_matches_label(obj, term) for term in _terms(labels)) and all(
        _matches_field(obj, term) for term in _terms(fields)
    )


def _terms(selector: str) -> list[str]:
    return [term for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _matches_label(obj: Json, term: str) -> bool:
    have = obj["metadata"].get("labels") or {}
    found = _IN.fullmatch(term)
    if found:
        values = {value.strip() for value in found[3].split(",")}
        return (have.get(found[1]) in values) == (found[2] == "in")
    for sign, wanted in (("!=", False), ("==", True), ("=", True)):
        key, split, value = term.partition(sign)
        if split:
            return (have.get(key.strip()) == value.strip()) is wanted
    term = term.strip()
    return term[1:] not in have if term.startswith("!") else term in have


_FIELDS = {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase"}


def _matches_field(obj: Json, term: str) -> bool:
    found = re.fullmatch(r"\s*([A-Za-z.]+)\s*(!=|==|=)\s*(.*?)\s*", term)
    if found is None or found[1] not in _FIELDS:
        raise errors.Invalid(f"field label not supported: {term}", code=400, reason="BadRequest")
    value: Any = obj
    for part in found[1].split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return ((value or "") == found[3]) is (found[2] != "!=")


# Ports


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a process, numbered from 1."""

    number: int
    verb: str
    """``get``, ``list``, ``watch``, ``create``, ``patch``, ``status`` or ``delete``."""
    kind: Kind
    namespace: str
    name: str
    body: Any = None

    @property
    def is_write(self) -> bool:
        """Whether it changes something."""
        return self.verb in ("create", "patch", "status", "delete")

    def __str__(self) -> str:
        return f"{self.number} {self.verb} {self.kind.plural} {self.namespace}/{self.name}"


class Mode(StrEnum):
    """When a process dies around a request."""

    BEFORE = "killed before it was sent"
    UNANSWERED = "applied, answer lost, killed"
    AFTER = "answered, then killed at once"


@dataclass
class _Fault:
    applies: Callable[[Request], bool]
    nth: int
    times: int
    error: errors.KubeError | None = None
    applied: bool = False
    late: bool = False
    hangs: bool = False
    twice: bool = False
    stale_version: int | None = None
    seen: int = 0

    def hits(self, request: Request) -> bool:
        if not self.applies(request):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


WatchFilter = Callable[[WatchEvent], Iterable[WatchEvent]]


class MemPort:
    """One process's door to a `MemCluster`: a `ClusterPort` where things go wrong on demand."""

    def __init__(self, cluster: MemCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.requests: list[Request] = []
        """Everything that was asked, in order."""
        self.dead = False
        self.paused: asyncio.Event | None = None
        """While set to an unset event, requests wait before they are sent."""
        self.answers_paused: asyncio.Event | None = None
        """While set to an unset event, answers of what was done wait on their way back."""
        self.rights: Callable[[Request], bool] = _any
        """Says which requests the process may make; others are forbidden."""
        self.watch_filter: WatchFilter = lambda event: (event,)
        """What becomes of each event on its way: dropped, repeated, kept back."""
        self.read_version: int | None = None
        """Version that all reads are served from; None = now."""
        self._faults: list[_Fault] = []
        self._late: list[tuple[Request, Callable[[], object]]] = []
        self._kill: tuple[int, Mode] | None = None

    # What goes wrong

    def fail(self, error: errors.KubeError, **which: Any) -> None:
        """Answer the request with *error*; nothing happens. See `_add` for *which*."""
        self._add(_Fault(_any, 1, 1, error=error), which)

    def lose(self, *, applied: bool, **which: Any) -> None:
        """Lose the answer; the request was *applied* or never arrived."""
        self._add(_Fault(_any, 1, 1, applied=applied, error=_lost()), which)

    def delay(self, **which: Any) -> None:
        """Give no answer now; the write arrives when `land` is called."""
        self._add(_Fault(_any, 1, 1, late=True, error=_lost()), which)

    def hang(self, **which: Any) -> None:
        """Never answer; the request never arrives either."""
        self._add(_Fault(_any, 1, 1, hangs=True), which)

    def repeat(self, **which: Any) -> None:
        """Deliver the write twice, as a proxy that tries again does."""
        self._add(_Fault(_any, 1, 1, twice=True), which)

    def stale(self, version: int, **which: Any) -> None:
        """Answer the read from the past."""
        self._add(_Fault(_any, 1, 1, stale_version=version), which)

    def kill_at(self, number: int, mode: Mode) -> None:
        """Kill the process around its request *number*."""
        self._kill = (number, mode)

    def land(self) -> list[Request]:
        """Let the delayed writes arrive now; return those that took effect."""
        landed = []
        late, self._late = self._late, []
        for request, act in late:
            with contextlib.suppress(errors.Refused):
                act()
                landed.append(request)
        return landed

    def _add(self, fault: _Fault, which: dict[str, Any]) -> None:
        """
        Arm *fault* for requests that match.

        Args:
            fault: What goes wrong.
            which: verb, kind, name; nth (1 = the next that matches), times.
        """
        fault.nth = which.pop("nth", 1)
        fault.times = which.pop("times", 1)
        verb, kind, name = which.pop("verb", None), which.pop("kind", None), which.pop("name", None)
        writes = which.pop("writes", False)
        assert not which, which

        def applies(request: Request) -> bool:
            return (
                (verb is None or request.verb == verb)
                and (kind is None or request.kind == kind)
                and (name is None or request.name == name)
                and (not writes or request.is_write)
            )

        fault.applies = applies
        self._faults.append(fault)

    # ClusterPort

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Return one object."""

        def act(version: int | None) -> Json:
            if version is None:
                return copied(self.cluster._existing(kind, namespace, name))
            found = self.cluster.as_of(version, kind, namespace, name)
            if found is None:
                raise errors.NotFound(f'{kind.plural} "{name}" not found', code=404)
            return found

        return await self._ask("get", kind, namespace, name, None, act)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listing:
        """Return all objects that match."""

        def act(version: int | None) -> Listing:
            cluster = self.cluster
            if version is None:
                found = cluster._list(kind, namespace, labels, fields)
            else:
                found = cluster._list_as_of(version, kind, namespace, labels, fields)
            return Listing(tuple(found), str(cluster.version if version is None else version))

        return await self._ask("list", kind, namespace, _named(fields), None, act)

    async def create(self, kind: Kind, namespace: str | None, body: Json) -> Json:
        """Create an object."""
        body = copied(body)
        return await self._ask(
            "create",
            kind,
            namespace,
            meta(body).get("name", ""),
            body,
            lambda _: self.cluster._create(kind, namespace, body, self.name),
        )

    async def patch_merge(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        *,
        version: str | None = None,
    ) -> Json:
        """Merge into an object."""
        patch = copied(patch)
        return await self._ask(
            "patch",
            kind,
            namespace,
            name,
            patch,
            lambda _: self.cluster._patch(kind, namespace, name, patch, version, self.name),
        )

    async def patch_status(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Json,
        *,
        version: str | None = None,
    ) -> Json:
        """Merge into a status."""
        patch = copied(patch)
        return await self._ask(
            "status",
            kind,
            namespace,
            name,
            patch,
            lambda _: self.cluster._patch(
                kind, namespace, name, patch, version, self.name, status=True
            ),
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        version: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        """Ask for an object to be deleted."""
        await self._ask(
            "delete",
            kind,
            namespace,
            name,
            {"uid": uid, "version": version},
            lambda _: self.cluster._delete(
                kind, namespace, name, self.name, uid=uid, version=version, grace_s=grace_s
            ),
        )

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        since: str,
        labels: str = "",
        fields: str = "",
        timeout_s: float = 270.0,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Report changes."""
        start = int(since)

        def act(_: int | None) -> _Watcher:
            if start < self.cluster.compacted:
                raise errors.Gone("too old resource version", code=410, reason="Expired")
            return _Watcher(self.cluster, kind, namespace, labels, fields, start)

        watcher = await self._ask("watch", kind, namespace, _named(fields), None, act)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await watcher.next()
                except TimeoutError:
                    return
                self._check_alive()
                if event is None:
                    return
                for each in self.watch_filter(event):
                    yield WatchEvent(each.change, copied(each.object))
        finally:
            watcher.close()

    def now(self) -> float:
        """Return monotonic seconds."""
        return self.cluster.now()

    def wall(self) -> datetime:
        """Return the UTC time."""
        return self.cluster.wall()

    # The way there and back

    def _check_alive(self) -> None:
        if self.dead:
            raise Killed(self.name)

    async def _ask(
        self,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Any,
        act: Callable[[int | None], T],
    ) -> T:
        self._check_alive()
        request = Request(
            len(self.requests) + 1, verb, kind, _ns(kind, namespace), name, copied(body)
        )
        self.requests.append(request)
        mode = self._kill[1] if self._kill and self._kill[0] == request.number else None
        await asyncio.sleep(0)  # others run while it is on its way
        if self.paused is not None:
            await self.paused.wait()
        self._check_alive()
        if mode is Mode.BEFORE:
            self.dead = True
            raise Killed(self.name)
        hits = [each for each in self._faults if each.hits(request)]  # all of them count
        fault = hits[0] if hits else None
        if self.cluster.down:
            raise errors.Unavailable("connection refused", call=str(request))
        if not self.rights(request):
            raise errors.Forbidden(f"{self.name} cannot {request}", code=403)
        if fault is not None and fault.hangs:
            await asyncio.get_running_loop().create_future()
        if fault is not None and fault.late:
            self._late.append((request, lambda: act(None)))
            raise _lost_read(fault, request)
        if fault is not None and fault.error is not None and not fault.applied:
            raise _lost_read(fault, request)
        version = self.read_version
        if fault is not None and fault.stale_version is not None:
            version = fault.stale_version
        try:
            result = act(None if request.is_write else version)
        except errors.KubeError:
            # A refusal is an answer, too.
            self.dead = self.dead or mode is not None
            if mode is Mode.UNANSWERED:
                raise Killed(self.name) from None
            raise
        if fault is not None and fault.twice and request.is_write:
            with contextlib.suppress(errors.Refused):
                act(None)
        if fault is not None and fault.error is not None:
            raise _lost_read(fault, request)
        if mode is Mode.UNANSWERED:
            self.dead = True
            raise Killed(self.name)
        await asyncio.sleep(0)  # and back
        if self.answers_paused is not None:
            await self.answers_paused.wait()
        self.dead = self.dead or mode is Mode.AFTER
        return result


def _any(request: Request) -> bool:
    return True


def _named(fields: str) -> str:
    """Return the one name that a field selector asks for; a Role can allow just that."""
    key, _, name = fields.partition("=")
    return name if key == "metadata.name" else ""


def _lost() -> errors.KubeError:
    return errors.Unanswered("no answer")


def _lost_read(fault: _Fault, request: Request) -> errors.KubeError:
    """Return the error of *fault*; a read that is lost is merely not answered."""
    assert fault.error is not None
    if isinstance(fault.error, errors.Unanswered) and not request.is_write:
        return errors.Timeout("no answer", call=str(request))
    return fault.error


class _Watcher:
    """The server's side of one watch."""

    def __init__(
        self,
        cluster: MemCluster,
        kind: Kind,
        namespace: str | None,
        labels: str,
        fields: str,
        since: int,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._queue: asyncio.Queue[WatchEvent | errors.KubeError | None] = asyncio.Queue()
        for write in cluster.writes:
            if write.version > since:
                self.see(write)
        cluster._watchers.add(self)

    def see(self, write: Write) -> None:
        """Queue what this watch reports of *write*."""
        if write.kind != self._kind or (
            self._namespace is not None
            and self._kind.namespaced
            and write.namespace != self._namespace
        ):
            return
        before = write.before is not None and self._selects(write.before)
        after = write.after is not None and self._selects(write.after)
        if after:
            assert write.after is not None
            self.add(WatchEvent(Change.MODIFIED if before else Change.ADDED, write.after))
        elif before:
            # The last state, at the version of its going.
            assert write.before is not None
            gone = {**write.before, "metadata": {**write.before["metadata"]}}
            gone["metadata"]["resourceVersion"] = str(write.version)
            self.add(WatchEvent(Change.DELETED, gone))

    def _selects(self, obj: Json) -> bool:
        return matches(obj, labels=self._labels, fields=self._fields)

    def add(self, event: WatchEvent) -> None:
        """Queue *event*."""
        self._queue.put_nowait(event)

    def end(self, error: errors.KubeError | None) -> None:
        """End it after what is queued."""
        self._queue.put_nowait(error)

    async def next(self) -> WatchEvent | None:
        """Return the next event; None at the end."""
        event = await self._queue.get()
        if isinstance(event, errors.KubeError):
            raise event
        return event

    def close(self) -> None:
        """Forget it."""
        self._cluster._watchers.discard(self)


# Filters for watches


def dropping(wanted: Callable[[WatchEvent], bool], times: int = 1) -> WatchFilter:
    """Return a filter that swallows the first *times* events that are *wanted*."""
    left = times

    def filtered(event: WatchEvent) -> Iterator[WatchEvent]:
        nonlocal left
        if left and wanted(event):
            left -= 1
            return
        yield event

    return filtered


def repeating() -> WatchFilter:
    """Return a filter that delivers everything twice, the second time after the next event."""
    last: list[WatchEvent] = []

    def filtered(event: WatchEvent) -> Iterator[WatchEvent]:
        yield event
        yield from last
        last[:] = [event]

    return filtered


def swapping() -> WatchFilter:
    """Return a filter that delivers every pair of events in the wrong order."""
    kept: list[WatchEvent] = []

    def filtered(event: WatchEvent) -> Iterator[WatchEvent]:
        if not kept:
            kept.append(event)
            return
        yield event
        yield kept.pop()

    return filtered


@dataclass
class Trail:
    """Collects writes for assertions: ``trail.since(mark)``."""

    cluster: MemCluster
    mark: int = field(default=0)

    def __post_init__(self) -> None:
        self.mark = len(self.cluster.writes)

    def new(self, actor: str | None = None) -> list[Write]:
        """Return the writes since the last call, by *actor* or anybody."""
        found = self.cluster.writes[self.mark :]
        self.mark = len(self.cluster.writes)
        return [write for write in found if actor is None or write.actor == actor]

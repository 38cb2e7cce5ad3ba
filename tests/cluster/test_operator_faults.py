"""
Operators and routers that are killed between any two of their writes, and made up for by others.

One story for all tests, because an operator waits for a minute before it acts: many pools of two
small members, each of which loses its actuator at another write. Nothing of that pool is written
from then on, which is all that a cluster ever sees of a death; the process is killed when the last
pool has got there. What was on its way at that moment is kept, and lands much later.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster_deaths import Deaths, about, is_take, members_of, stage
from cluster_eye import PodEye
from cluster_faults import Fate, FaultyWay, Write
from cluster_ground import Ground
from cluster_kubectl import Object, until
from cluster_operator import Operator
from cluster_roles import OPERATOR, router_account
from cluster_router import Answer, RouterProcess
from cluster_slot import epoch_of, is_settled
from harness import Cluster
from modelpool_api.names import RECORD_ANNOTATION

pytestmark = pytest.mark.cluster
ROUTED = [f"r{number:02}" for number in range(1, 12)]
"""Pools whose router dies before its first, second, third ... write of a swap."""
COLD = [f"o{number:02}" for number in range(1, 18)]
"""Pools whose operator dies before its first, second, third ... write for a cold default."""
DEPOSED = "d01"


class OperatorRule:
    """
    The rule for the operator that is killed in the end.

    Attributes:
        deaths: Of the pools that were cold.
        deposed: What it has on its way for the pool that a router gets meanwhile.
        is_asleep: Whether it was put to sleep; it may write again when it wakes up.
    """

    def __init__(self) -> None:
        self.deaths = Deaths(COLD)
        self.deposed: Write | None = None
        self.is_asleep = False

    def __call__(self, write: Write) -> Fate:
        if about(write) != DEPOSED:
            return self.deaths(write)
        if self.deposed is not None:
            return Fate.PASS if self.is_asleep else Fate.LOSE
        if (write.name, write.replicas) != (f"{DEPOSED}-a", 1):
            return Fate.PASS
        self.deposed = write
        return Fate.CUT_AND_HOLD


@dataclass
class State:
    """What is stored about a pool."""

    up: list[str]
    epochs: set[int]
    record: Any
    holder: str
    status: Object

    @property
    def is_legal(self) -> bool:
        """Whether nothing is half done, and everything tells the same story."""
        return self.record is not None and is_settled(self.record, self.up, self.epochs)


class World(Ground):
    """The pools in one namespace."""

    def create(self) -> None:
        """Make the members, at 0, and the pools."""
        every = [*ROUTED, *COLD, DEPOSED]
        self.apply(*(self.deployment(each, gpus=0) for pool in every for each in members_of(pool)))
        self.apply(*(self.pool_object(pool) for pool in every))

    def pool_object(self, name: str) -> Object:
        """A pool; the ones of routers have no default."""
        refs = [
            {"deploymentRef": {"name": each}, "profile": "llama-server"}
            for each in members_of(name)
        ]
        more = {} if name in ROUTED else {"default": members_of(name)[0]}
        return self.pool(name, *refs, **more)

    def states(self) -> dict[str, State]:
        """Return what is stored about every pool."""
        deployments = self._by_name("deployments")
        leases = self._by_name("leases")
        found = {}
        for name, pool in self._by_name("modelpools").items():
            lease = leases.get(f"modelpool-{name}", {})
            notes = lease.get("metadata", {}).get("annotations", {})
            members = {each: deployments[each] for each in members_of(name)}
            found[name] = State(
                [each for each, obj in members.items() if obj["spec"]["replicas"]],
                {epoch_of(obj) for obj in members.values()},
                json.loads(notes[RECORD_ANNOTATION]) if RECORD_ANNOTATION in notes else None,
                str(lease.get("spec", {}).get("holderIdentity", "")),
                pool.get("status", {}),
            )
        return found

    def generations_of_all(self) -> dict[str, Any]:
        """What changes when anybody scales or marks a member."""
        found = self._by_name("deployments")
        return {each: (obj["metadata"]["generation"], epoch_of(obj)) for each, obj in found.items()}

    def _by_name(self, kind: str) -> dict[str, Object]:
        listed = self.kubectl.items(kind, "-n", self.namespace)
        return {each["metadata"]["name"]: each for each in listed}


@dataclass
class Story:
    """What happened; the tests below look at it."""

    operator_deaths: dict[str, Write] = field(default_factory=dict)
    router_deaths: dict[str, Write] = field(default_factory=dict)
    served_before: dict[str, int] = field(default_factory=dict)
    warmed: set[str] = field(default_factory=set)
    deposed: list[Write] = field(default_factory=list)
    deposed_wrote: list[Write] = field(default_factory=list)
    deposed_state: State | None = None
    other_served: Answer | None = None
    states: dict[str, State] = field(default_factory=dict)
    late: list[Write] = field(default_factory=list)
    moved_by_late: list[str] = field(default_factory=list)
    is_quiet: bool = False
    answers: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    overlaps: list[tuple[str, str, str]] = field(default_factory=list)
    pods_seen: int = 0
    gaps: int = 0
    took: dict[str, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with stage(cluster, "faults") as (namespace, eye, stack):
        told = Telling(World(cluster, namespace), tmp_path_factory.mktemp("story"), stack, eye)
        yield told.tell()


class Telling:
    """The order of events."""

    def __init__(self, world: World, folder: Path, stack: ExitStack, eye: PodEye) -> None:
        self.world = world
        self.story = Story()
        self._folder = folder
        self._stack = stack
        self._eye = eye
        self._began = time.monotonic()
        cluster = world.cluster
        operator = cluster.service_account(*OPERATOR)
        self._ways = {
            name: FaultyWay(account, folder / f"way-{name}")
            for name, account in (
                ("operator-0", operator),
                ("operator-1", operator),
                ("router", self._account("router", ROUTED)),
            )
        }
        for way in self._ways.values():
            stack.callback(way.close)

    def tell(self) -> Story:
        """Let it all happen."""
        story, world = self.story, self.world
        way = self._ways["operator-0"]
        way.rule = rule = OperatorRule()
        world.create()
        first = self._operator("operator-0")
        self._note("pools are made")
        self._kill_routers()
        self._note("routers are dead")
        until(lambda: self._warmed() | set(rule.deaths.last) >= set(COLD), "operators die", 120)
        until(lambda: rule.deposed, "the deposed operator has a write on its way", 90)
        first.send(signal.SIGSTOP)
        rule.is_asleep = True
        story.warmed = self._warmed()
        story.operator_deaths = rule.deaths.last
        self._note("the operator sleeps")
        self._operator("operator-1")
        self._depose(first, way)
        first.stop(signal.SIGKILL)
        self._note("the operator is dead")

        until(self._all_legal, "everything is legal again", 200)
        self._note("everything is legal")
        story.is_quiet = self._is_at_rest()
        story.states = world.states()
        self._land_late()
        self._note("late writes have landed")
        self._serve_again()
        self._note("everything was served")
        self._eye.close()
        story.overlaps, story.pods_seen = self._eye.overlaps, len(self._eye.seen)
        story.gaps = self._eye.gaps
        print(*(f"{at:6.1f} s  {what}" for what, at in story.took.items()), sep="\n")
        return story

    # Chapters

    def _kill_routers(self) -> None:
        story, way = self.story, self._ways["router"]
        until(lambda: self._have_leases(ROUTED), "the pools have Leases", 60)
        router = self._router("host_router", ROUTED, way)
        router.start()
        self._ask_all(router, "a", expected=200)
        way.rule = deaths = Deaths(ROUTED)
        asking = threading.Thread(target=self._ask_all, args=(router, "b"))
        asking.start()
        served = story.served_before
        until(lambda: set(deaths.last) | set(served) >= set(ROUTED), "routers die", 60)
        router.stop(signal.SIGKILL)
        asking.join()
        story.router_deaths = deaths.last

    def _depose(self, first: Operator, way: FaultyWay) -> None:
        story, world = self.story, self.world
        router = self._router("host_other", [DEPOSED], None)
        router.start()
        until(lambda: self._serves(router, "d01-b"), "the router has the slot", 60)
        story.other_served = router.chat("d01-b")
        before = len(way.writes)
        story.deposed = way.release(lambda write: about(write) == DEPOSED)
        first.send(signal.SIGCONT)
        time.sleep(3)  # long enough for whatever it would still do
        story.deposed_wrote = [
            write
            for write in way.writes[before:]
            # A status is conditional on the version that was read: whoever writes it, it is true.
            if write.kind == "deployments" and write.fate is Fate.PASS and write.status == 200
        ]
        story.deposed_state = world.states()[DEPOSED]
        router.stop()

    def _land_late(self) -> None:
        before = self.world.generations_of_all()
        for name in ("operator-0", "router"):
            self.story.late += self._ways[name].release()
        time.sleep(2)  # long enough for whatever would come of it
        after = self.world.generations_of_all()
        self.story.moved_by_late = [each for each in before if before[each] != after[each]]

    def _serve_again(self) -> None:
        router = self._router("host_router", ROUTED, None)
        router.start()
        for which in ("a", "b"):
            self._ask_all(router, which, answers=self.story.answers)
        assert router.stop() == 0

    def _is_at_rest(self) -> bool:
        """Whether the operator, once it is done, writes nothing for longer than it waits."""
        way = self._ways["operator-1"]
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            if time.monotonic() - way.counted()[-1].at > 6:
                return True
            time.sleep(0.5)
        return False

    # Small things

    def _operator(self, name: str) -> Operator:
        made = Operator(self._ways[name].kubeconfig, self._folder / f"{name}.log", name)
        self._stack.callback(lambda: made.is_running and made.stop(signal.SIGKILL))
        return made

    def _account(self, name: str, pools: list[str]) -> Path:
        objects = [self.world.pool_object(pool) for pool in pools]
        return router_account(self.world.cluster, name, *objects)

    def _router(self, name: str, pools: list[str], way: FaultyWay | None) -> RouterProcess:
        account = self._account(name.replace("_", "-"), pools) if way is None else way.kubeconfig
        namespace = self.world.namespace
        made = RouterProcess(
            self.world.cluster,
            self._folder / name,
            name,
            leaseNamespace=namespace,
            kubernetes={"kubeconfig": str(account)},
            pools=[
                {
                    "name": pool,
                    "linger": "0s",
                    "swapBudget": "90s",
                    "members": [
                        {
                            "name": each,
                            "profile": "llama-server",
                            "deployment": {"namespace": namespace, "name": each},
                        }
                        for each in members_of(pool)
                    ],
                }
                for pool in pools
            ],
        )
        self._stack.callback(made.stop, signal.SIGKILL)
        return made

    def _ask_all(
        self,
        router: RouterProcess,
        which: str,
        *,
        expected: int | None = None,
        answers: dict[str, list[tuple[int, str]]] | None = None,
    ) -> None:
        """Ask one member of every routed pool, all at once."""

        def ask(pool: str) -> None:
            with contextlib.suppress(OSError):
                answer = router.chat(f"{pool}-{which}", 120)
                if answers is not None:
                    answers.setdefault(pool, []).append((answer.status, answer.member))
                elif answer.status == 200:
                    self.story.served_before[pool] = answer.status
                assert expected is None or answer.status == expected, answer.body

        threads = [threading.Thread(target=ask, args=(pool,)) for pool in ROUTED]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if expected is not None:
            assert set(self.story.served_before) == set(ROUTED)
            self.story.served_before.clear()

    def _serves(self, router: RouterProcess, model: str) -> bool:
        return router.chat(model, 120).status == 200

    def _have_leases(self, pools: list[str]) -> bool:
        listed = self.world.kubectl.items("leases", "-n", self.world.namespace)
        names = {each["metadata"]["name"] for each in listed}
        return {f"modelpool-{pool}" for pool in pools} <= names

    def _warmed(self) -> set[str]:
        """Return the pools whose default is up, with nothing left to do."""
        return {
            pool
            for pool, state in self.world.states().items()
            if state.is_legal and state.up and not state.holder and state.status["phase"] == "Ready"
        }

    def _all_legal(self) -> bool:
        time.sleep(1)  # it is a lot to read
        states = self.world.states()
        cold = all(states[pool].is_legal and states[pool].up == [f"{pool}-a"] for pool in COLD)
        return cold and all(states[pool].is_legal for pool in ROUTED)

    def _note(self, what: str) -> None:
        self.story.took[what] = time.monotonic() - self._began


def test_a_router_is_killed_at_any_write_and_the_operator_ends_what_it_began(story: Story) -> None:
    print(*(f"{pool}: before {write}" for pool, write in story.router_deaths.items()), sep="\n")
    dead = story.router_deaths
    assert set(dead) >= set(ROUTED[:8])
    assert set(story.served_before) - set(dead), "a whole swap has fewer writes than that"
    kinds = [str(write) for write in dead.values()]
    assert any(kind.endswith("to 0") for kind in kinds)
    assert any(kind.endswith("to 1") for kind in kinds)
    for pool in ROUTED:
        assert story.states[pool].is_legal, (pool, dead.get(pool), story.states[pool])


def test_an_operator_is_killed_between_any_two_writes_and_another_makes_up_for_it(
    story: Story,
) -> None:
    print(*(f"{pool}: before {write}" for pool, write in story.operator_deaths.items()), sep="\n")
    dead = story.operator_deaths
    assert set(dead) >= set(COLD[:12])
    assert story.warmed & set(COLD), "warming a cold pool takes fewer writes than that"
    for wanted in ("create", "take", "record", "mark", "scale"):
        assert any(_is(wanted, write) for write in dead.values()), wanted
    for pool in COLD:
        state = story.states[pool]
        assert state.is_legal, (pool, dead.get(pool), state)
        assert state.up == [f"{pool}-a"]
        assert (state.status["phase"], state.status["residentMember"]) == ("Ready", f"{pool}-a")


def _is(what: str, write: Write) -> bool:
    match what:
        case "create":
            return write.method == "POST" and write.kind == "leases"
        case "take":
            return is_take(write)
        case "record":
            return write.record is not None
        case "mark":
            return write.is_mark
        case _:
            return write.replicas is not None


def test_a_deposed_operator_writes(story: Story) -> None:
    [write] = story.deposed
    assert (write.name, write.replicas, write.status) == ("d01-a", 1, 409)
    assert story.deposed_wrote == []
    assert story.other_served is not None
    assert story.other_served.member == "d01-b"
    assert story.deposed_state is not None
    assert story.deposed_state.up == ["d01-b"]


def test_what_the_dead_had_on_its_way_lands_late_and_changes_nothing(story: Story) -> None:
    assert len(story.late) == len(story.router_deaths) + len(story.operator_deaths)
    landed = [write for write in story.late if write.status is None or write.status < 400]
    # Where nobody has touched the Lease since, a record may land: it announces, and moves nothing.
    assert [str(write) for write in landed if write.kind not in ("events", "leases")] == []
    assert story.moved_by_late == []


def test_at_rest_nothing_is_written(story: Story) -> None:
    assert story.is_quiet


def test_a_fresh_router_serves_what_the_operator_has_left(story: Story) -> None:
    wanted = {pool: [(200, f"{pool}-a"), (200, f"{pool}-b")] for pool in ROUTED}
    assert story.answers == wanted


def test_never_two(story: Story) -> None:
    assert story.overlaps == []
    assert story.gaps == 0
    assert story.pods_seen >= len(ROUTED) * 2 + len(COLD)

"""
An operator that is killed between any two of its writes and starts again under the same name.

One story for all tests, in which everything that an operator does happens at the same time, while
a router of a ModelRouter runs. It holds a request for each of the pools that swap, and can only go
on when the operator hands its epoch down to the Deployments of InferenceServices.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster_deaths import Deaths, about, is_take, members_of, stage
from cluster_eye import PodEye
from cluster_faults import Fate, FaultyWay, Write
from cluster_ground import Ground, deployment_ref, service_ref
from cluster_kubectl import Object, until
from cluster_operator import Operator
from cluster_roles import OPERATOR, compiled_rules
from cluster_router import Answer, Front
from cluster_slot import epoch_of, is_settled
from harness import Cluster
from modelpool_api.names import RECORD_ANNOTATION

pytestmark = pytest.mark.cluster
SWAPPED = [f"s{number:02}" for number in range(1, 11)]
"""Pools of InferenceServices whose router swaps; the operator dies before its n-th write of it."""
MADE = [f"m{number:02}" for number in range(1, 12)]
"""Pools with a member and a ModelRouter that the operator sees for the first time, and dies."""
COLD = [f"c{number:02}" for number in range(1, 8)]
"""Pools without a router: the operator dies before its n-th write after it has taken the Lease."""
CHANGED = "x01"
"""A pool that gets a third member; the operator dies before it has renewed the Role."""
CHILDREN = ("serviceaccounts", "roles", "rolebindings", "configmaps", "deployments", "services")


class Rule:
    """
    What becomes of what the operator writes before it is killed.

    Attributes:
        swaps: Of the pools that swap; they live until `has_begun`.
        has_begun: Whether swaps have.
        made: Of what is made.
        cold: Of the pools that are warmed.
        role: The write of the Role that is not made.
    """

    def __init__(self) -> None:
        self.swaps, self.made, self.cold = Deaths(SWAPPED), Deaths(MADE), Deaths(COLD)
        self.has_begun = False
        self.taken: set[str] = set()
        self.role: Write | None = None

    def __call__(self, write: Write) -> Fate:
        pool = about(write)
        if pool in MADE:
            return self.made(write)
        if pool in COLD:
            if is_take(write):
                self.taken.add(pool)
                return Fate.PASS
            return self.cold(write) if pool in self.taken else Fate.PASS
        if not self.has_begun or write.kind == "events":
            return Fate.PASS
        if (write.kind, write.name) == ("roles", "front"):
            if self.role is not None:
                return Fate.LOSE
            self.role = write
            return Fate.CUT_AND_HOLD
        return self.swaps(write)


@dataclass
class Story:
    """What happened; the tests below look at it."""

    swap_deaths: dict[str, Write] = field(default_factory=dict)
    made_deaths: dict[str, Write] = field(default_factory=dict)
    cold_deaths: dict[str, Write] = field(default_factory=dict)
    before: dict[str, Answer] = field(default_factory=dict)
    overtaken: set[str] = field(default_factory=set)
    answers: dict[str, Answer] = field(default_factory=dict)
    role_death: Write | None = None
    while_dead: Answer | None = None
    third: Answer | None = None
    unmade: dict[str, list[str]] = field(default_factory=dict)
    cold: dict[str, Any] = field(default_factory=dict)
    late: list[Write] = field(default_factory=list)
    moved_by_late: list[str] = field(default_factory=list)
    overlaps: list[tuple[str, str, str]] = field(default_factory=list)
    took: dict[str, float] = field(default_factory=dict)


class World(Ground):
    """All the pools, in one namespace."""

    def create(self) -> None:
        """Make everything but what is made while the operator dies."""
        served = [each for pool in (*SWAPPED, CHANGED) for each in members_of(pool)]
        served.append(f"{CHANGED}-c")
        self.apply(
            *(self.service(each, gpus=0, replicas=0) for each in served),
            *(self.deployment(each, gpus=0) for pool in COLD for each in members_of(pool)),
        )
        routed = [*SWAPPED, CHANGED]
        self.apply(
            *(
                self.pool(each, *map(deployment_ref, members_of(each)), default=f"{each}-a")
                for each in COLD
            ),
            *(self.pool(each, *map(service_ref, members_of(each)), linger="0s") for each in routed),
            self.router(*routed),
        )

    def pool_of(self, name: str, ref: Callable[[str], Object], **spec: Any) -> Object:
        """A pool of two."""
        return self.pool(name, *map(ref, members_of(name)), **spec)

    def create_made(self) -> None:
        """Make what the operator will not live to see whole."""
        for each in MADE:
            router = self.router(each, image="modelpool.test/absent")
            router["metadata"]["name"] = each
            self.apply(
                self.service(f"{each}-a", gpus=0, replicas=0), self.pool_of_one(each), router
            )

    def pool_of_one(self, name: str) -> Object:
        """A pool of what is made."""
        return self.pool(name, service_ref(f"{name}-a"))

    def by_name(self, kind: str) -> dict[str, Object]:
        """All objects of a kind."""
        return {each["metadata"]["name"]: each for each in self.items_of(kind)}

    def generations_of_all(self) -> dict[str, Any]:
        """What changes when anybody scales or marks a Deployment."""
        found = self.by_name("deployments")
        return {each: (obj["metadata"]["generation"], epoch_of(obj)) for each, obj in found.items()}

    def unmade(self) -> dict[str, list[str]]:
        """What is missing, by what is made."""
        there = {kind: self.by_name(kind) for kind in CHILDREN}
        leases, pools = self.by_name("leases"), self.by_name("modelpools")
        services, routers = self.by_name("inferenceservices"), self.by_name("modelrouters")
        found: dict[str, list[str]] = {}
        for each in MADE:
            member = f"{each}-a"
            missing = [kind for kind in CHILDREN if each not in there[kind]]
            missing += [kind for kind in ("deployments", "services") if member not in there[kind]]
            if f"modelpool-{each}" not in leases:
                missing.append("leases")
            role = there["roles"].get(each, {})
            if role.get("rules") != compiled_rules(self.pool_of_one(each)):
                missing.append("rules of the Role")
            for what, obj in (
                ("pool", pools[each]),
                ("router", routers[each]),
                ("service", services[member]),
            ):
                status = obj.get("status", {})
                if status.get("observedGeneration") != obj["metadata"]["generation"]:
                    missing.append(f"status of the {what}")
            if services[member].get("status", {}).get("phase") != "Stopped":
                missing.append("phase of the service")
            if missing:
                found[each] = missing
        return found

    def cold_of(self, pool: str, deployments: dict[str, Object], leases: dict[str, Object]) -> Any:
        """What is stored about a pool that was cold, if it is warm and nobody moves it; or None."""
        notes = leases[f"modelpool-{pool}"]["metadata"].get("annotations", {})
        if RECORD_ANNOTATION not in notes:
            return None
        record = self.record(pool)
        members = {each: deployments[each] for each in members_of(pool)}
        up = [each for each, obj in members.items() if obj["spec"]["replicas"]]
        is_warm = up == [f"{pool}-a"] and members[up[0]].get("status", {}).get("readyReplicas") == 1
        epochs = set(map(epoch_of, members.values()))
        return record if is_warm and is_settled(record, up, epochs) else None


class Telling:
    """The order of events."""

    def __init__(self, world: World, folder: Path, stack: ExitStack, eye: PodEye) -> None:
        self.world = world
        self.story = Story()
        self._folder = folder
        self._stack = stack
        self._eye = eye
        self._began = time.monotonic()
        self._account = world.cluster.service_account(*OPERATOR)
        self._way = FaultyWay(self._account, folder / "way")
        stack.callback(self._way.close)

    def tell(self) -> Story:
        """Let it all happen."""
        story, world = self.story, self.world
        self._way.rule = rule = Rule()
        first = self._operator(self._way.kubeconfig)
        world.create()
        front = world.front()
        self._note("the router is ready")
        clients = self._stack.enter_context(ThreadPoolExecutor(len(SWAPPED) + 1))
        firsts = {each: clients.submit(_warmed, front, f"{each}-a") for each in (*SWAPPED, CHANGED)}
        story.before = {each: one.result() for each, one in firsts.items()}
        self._note("all pools are warm")
        world.create_made()
        until(lambda: self._has_died(rule), "the operator dies of what it makes and warms", 150)
        self._note("the operator has begun everything")
        rule.has_begun = True
        asked = {each: clients.submit(front.chat, f"{each}-b", 200) for each in SWAPPED}
        until(lambda: self._is_in_the_way(rule, asked), "the operator dies of the swaps", 60)
        self._add_a_member(rule)
        story.overtaken = {each for each, one in asked.items() if one.done()}
        story.swap_deaths = dict(rule.swaps.last)
        story.made_deaths = dict(rule.made.last)
        story.cold_deaths = dict(rule.cold.last)
        story.role_death = rule.role
        story.while_dead = front.chat(f"{CHANGED}-a")
        first.stop(signal.SIGKILL)
        self._note("the operator is dead")

        self._operator(self._account)
        story.answers = {each: one.result() for each, one in asked.items()}
        self._note("everything that was held is served")
        until(lambda: self._third(front), "the router may move the third member", 60)
        self._note("the Role is renewed")
        until(lambda: not world.unmade(), "everything is made", 60)
        story.unmade = world.unmade()
        self._note("everything is made")
        until(self._is_warm, "all cold pools are warm", 60)
        self._note("all cold pools are warm")
        before = world.generations_of_all()
        story.late = self._way.release()
        time.sleep(2)  # long enough for whatever would come of it
        after = world.generations_of_all()
        story.moved_by_late = [each for each in before if before[each] != after[each]]
        self._eye.close()
        story.overlaps = self._eye.overlaps
        print(*(f"{at:6.1f} s  {what}" for what, at in story.took.items()), sep="\n")
        return story

    def _add_a_member(self, rule: Rule) -> None:
        members = [service_ref(f"{CHANGED}-{each}") for each in ("a", "b", "c")]
        self.world.patch(f"mpool/{CHANGED}", {"spec": {"members": members}})
        until(lambda: rule.role, "the operator dies before it renews the Role", 60)

    def _has_died(self, rule: Rule) -> bool:
        warm = set(rule.cold.last) | self._warm()
        return set(rule.made.last) >= set(MADE[:9]) and warm >= set(COLD)

    def _is_in_the_way(self, rule: Rule, asked: dict[str, Future[Answer]]) -> bool:
        served = {each for each, one in asked.items() if one.done()}
        return set(rule.swaps.last) | served >= set(SWAPPED)

    def _third(self, front: Front) -> bool:
        answer = front.chat(f"{CHANGED}-c", 120)
        self.story.third = answer
        return answer.status == 200

    def _warm(self) -> set[str]:
        deployments, leases = self.world.by_name("deployments"), self.world.by_name("leases")
        found = {each: self.world.cold_of(each, deployments, leases) for each in COLD}
        self.story.cold = found
        return {each for each, record in found.items() if record}

    def _is_warm(self) -> bool:
        return self._warm() == set(COLD)

    def _operator(self, kubeconfig: Path) -> Operator:
        made = Operator(kubeconfig, self._folder / "operator-0.log", "operator-0")
        self._stack.callback(lambda: made.is_running and made.stop(signal.SIGKILL))
        return made

    def _note(self, what: str) -> None:
        self.story.took[what] = time.monotonic() - self._began


@pytest.fixture(scope="module")
def story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with stage(cluster, "restarts") as (namespace, eye, stack):
        told = Telling(World(cluster, namespace), tmp_path_factory.mktemp("restarts"), stack, eye)
        yield told.tell()


def _warmed(front: Front, member: str) -> Answer:
    """Ask until the router holds the slot, whose Lease may be made late, and *member* answers."""

    def asked() -> Answer | None:
        answer = front.chat(member, 120)
        is_early = answer.status == 503 and answer.code == "slot_unavailable"
        return None if is_early else answer

    found = until(asked, f"the router holds the slot of {member}")
    assert found is not None
    return found


def told(deaths: dict[str, Write]) -> list[str]:
    """Print before what an operator died, and return it."""
    found = [f"{write.method} {write.kind}" for write in deaths.values()]
    print(*(f"{pool}: before {write}" for pool, write in deaths.items()), sep="\n")
    return found


def test_what_a_router_holds_is_served_when_the_operator_is_killed_at_any_write(
    story: Story,
) -> None:
    kinds = told(story.swap_deaths)
    assert {(each.status, each.member) for each in story.before.values()} == {
        (200, f"{pool}-a") for pool in (*SWAPPED, CHANGED)
    }
    assert set(story.swap_deaths) >= set(SWAPPED[:6])
    assert len(SWAPPED) - len(story.overtaken) >= 3, "they were still held when it was killed"
    assert any(each.endswith("/status") for each in kinds)
    # What hands the epoch down: some to an incumbent that goes, some to the target.
    down = [each for each in story.swap_deaths.values() if each.kind == "deployments"]
    assert {each.name[-1] for each in down} == {"a", "b"}
    answered = {pool: (each.status, each.member) for pool, each in story.answers.items()}
    assert answered == {pool: (200, f"{pool}-b") for pool in SWAPPED}
    assert all(
        int(story.answers[pool].headers["x-modelpool-held-ms"]) > 0
        for pool in set(SWAPPED) - story.overtaken
    )


def test_a_member_that_came_while_the_operator_died_is_served_once_the_role_is_renewed(
    story: Story,
) -> None:
    assert story.role_death is not None
    assert story.while_dead is not None
    assert (story.while_dead.status, story.while_dead.member) == (200, f"{CHANGED}-a")
    assert story.third is not None
    assert story.third.member == f"{CHANGED}-c"


def test_what_an_operator_has_half_made_is_made_by_its_next_life(story: Story) -> None:
    kinds = told(story.made_deaths)
    assert len({f"POST {kind}" for kind in CHILDREN} & set(kinds)) >= 4
    assert story.unmade == {}


def test_the_next_life_of_an_operator_takes_up_what_it_has_begun(story: Story) -> None:
    told(story.cold_deaths)
    assert set(story.cold_deaths) >= set(COLD[:5])
    dead = story.cold_deaths.values()
    assert any(each.record is not None for each in dead)
    assert any(each.is_mark for each in dead)
    assert any(each.replicas == 1 for each in dead)
    assert {pool: record["owner"] for pool, record in story.cold.items()} == {
        pool: f"{pool}-a" for pool in COLD
    }


def test_what_the_dead_had_on_its_way_lands_late_and_changes_nothing(story: Story) -> None:
    dead = (story.swap_deaths, story.made_deaths, story.cold_deaths)
    assert len(story.late) == sum(map(len, dead)) + 1
    landed = [write for write in story.late if write.status is None or write.status < 400]
    # Where nobody has touched the Lease since, a record may land: it announces, and moves nothing.
    assert [str(write) for write in landed if write.kind not in ("events", "leases")] == []
    assert story.moved_by_late == []


def test_never_two(story: Story) -> None:
    assert story.overlaps == []

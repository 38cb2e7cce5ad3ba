"""The reflector: it ends up knowing the truth, whatever happens to its watch, and never hurries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from apistub import answer, failure, stream, stub
from memcluster import MemCluster, WatchFilter, dropping, repeating, swapping
from modelpool_kube import errors
from modelpool_kube.kinds import CONFIGMAPS, Json
from modelpool_kube.port import Change, ClusterPort, Listing, WatchEvent
from modelpool_kube.watch import Notice, Reflector
from portcases import config

virtual = pytest.mark.looptime(idle_timeout=10_000)


class Follower:
    """A reflector with what it told."""

    def __init__(self, port: ClusterPort) -> None:
        self.told: list[str] = []
        self.mirror: dict[str, Json] = {}
        self.reflector = Reflector(port, CONFIGMAPS, "lab", notify=self.take, rng=random.Random(1))

    def take(self, notice: Notice) -> None:
        """Keep a mirror from the notices alone; it must always equal the cache."""
        name = notice.object["metadata"]["name"]
        self.told.append(f"{notice.change.value.lower()} {name}")
        match notice.change:
            case Change.ADDED:
                assert name not in self.mirror
                self.mirror[name] = notice.object
            case Change.MODIFIED:
                assert notice.before == self.mirror[name]
                assert notice.before["metadata"]["uid"] == notice.object["metadata"]["uid"]
                self.mirror[name] = notice.object
            case Change.DELETED:
                assert self.mirror[name]["metadata"]["uid"] == notice.object["metadata"]["uid"]
                del self.mirror[name]
            case Change.BOOKMARK:
                raise AssertionError("a bookmark is no change")

    def believed(self) -> dict[str, str]:
        """Return the versions in the cache."""
        assert {k[1]: v for k, v in self.reflector.items.items()} == self.mirror
        return {name: obj["metadata"]["resourceVersion"] for name, obj in self.mirror.items()}


def truth(cluster: MemCluster) -> dict[str, str]:
    """Return the versions in the cluster."""
    return {
        obj["metadata"]["name"]: obj["metadata"]["resourceVersion"]
        for obj in cluster.all(CONFIGMAPS, "lab")
    }


@contextlib.asynccontextmanager
async def following(port: ClusterPort) -> AsyncIterator[Follower]:
    """Run a reflector."""
    follower = Follower(port)
    task = asyncio.get_running_loop().create_task(follower.reflector.run())
    try:
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def soon() -> None:
    """Let everything that can happen now happen."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def cluster() -> MemCluster:
    """A cluster with one object."""
    cluster = MemCluster()
    cluster.put(CONFIGMAPS, "lab", config("a"))
    return cluster


@virtual
async def test_it_lists_then_follows(cluster: MemCluster) -> None:
    async with following(cluster.port("p")) as f:
        await f.reflector.synced.wait()
        await soon()
        cluster.put(CONFIGMAPS, "lab", config("b"))
        cluster.edit(CONFIGMAPS, "lab", "a", {"data": {"x": "1"}})
        cluster.remove(CONFIGMAPS, "lab", "b")
        cluster.put(CONFIGMAPS, "other", config("c"))
        await soon()

        assert f.told == ["added a", "added b", "modified a", "deleted b"]
        assert f.believed() == truth(cluster)
        assert f.reflector.get("lab", "a") is not None
        assert f.reflector.get("lab", "b") is None


@virtual
@pytest.mark.parametrize(
    "spoil",
    [repeating(), swapping(), dropping(lambda event: True, times=2)],
    ids=["repeated", "reordered", "lost"],
)
async def test_lost_repeated_and_reordered_events_are_made_up_for(
    cluster: MemCluster, spoil: WatchFilter
) -> None:
    port = cluster.port("p")
    port.watch_filter = spoil
    async with following(port) as f:
        await f.reflector.synced.wait()
        await soon()
        for name in ("b", "c"):
            cluster.put(CONFIGMAPS, "lab", config(name))
            cluster.edit(CONFIGMAPS, "lab", name, {"data": {"x": "1"}})
        cluster.remove(CONFIGMAPS, "lab", "b")
        cluster.put(CONFIGMAPS, "lab", config("b"))
        cluster.remove(CONFIGMAPS, "lab", "a")
        await asyncio.sleep(301)

        assert f.believed() == truth(cluster)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_to_the_watch_it_ends_up_with_the_truth(data: st.DataObject) -> None:
    """Events of a random history arrive lost, twice and in any order; the next list mends all."""
    history = MemCluster()
    seen: list[WatchEvent] = []

    def record() -> None:
        write = history.writes[-1]
        obj = write.after
        if obj is None:
            assert write.before is not None
            obj = {
                **write.before,
                "metadata": {**write.before["metadata"], "resourceVersion": str(write.version)},
            }
        seen.append(WatchEvent(write.change, obj))

    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from("ab"))
        if history.read(CONFIGMAPS, "lab", name) is None:
            history.put(CONFIGMAPS, "lab", config(name))
        elif data.draw(st.booleans()):
            history.edit(CONFIGMAPS, "lab", name, {"data": {"n": str(len(seen))}})
        else:
            history.remove(CONFIGMAPS, "lab", name)
        record()
    port = history.port("p")
    follower = Follower(port)
    reflector = follower.reflector
    versions: dict[str, int] = {}
    for event in data.draw(st.lists(st.sampled_from(seen), max_size=30)):
        reflector._take(event)
        for name, version in follower.believed().items():
            key = f"{name} {follower.mirror[name]['metadata']['uid']}"
            assert int(version) >= versions.get(key, 0)
            versions[key] = int(version)

    reflector._replace(Listing(tuple(history.all(CONFIGMAPS, "lab")), str(history.version)))

    assert follower.believed() == truth(history)
    for event in seen:  # and nothing of the past changes it any more
        reflector._take(event)
    assert {name: v for name, v in follower.believed().items() if name in truth(history)} == truth(
        history
    )


@virtual
async def test_another_object_under_the_same_name_is_reported_as_such(cluster: MemCluster) -> None:
    port = cluster.port("p")
    async with following(port) as f:
        await f.reflector.synced.wait()
        await soon()
        port.watch_filter = dropping(lambda event: event.change is Change.DELETED)
        cluster.remove(CONFIGMAPS, "lab", "a")
        cluster.put(CONFIGMAPS, "lab", config("a", x="2"))
        await soon()

        assert f.told == ["added a", "deleted a", "added a"]
        assert f.believed() == truth(cluster)


@virtual
async def test_a_version_that_is_too_old_is_listed_again(cluster: MemCluster) -> None:
    port = cluster.port("p")
    port.fail(errors.Gone("too old", code=410), verb="watch")
    async with following(port) as f:
        await f.reflector.synced.wait()
        cluster.put(CONFIGMAPS, "lab", config("b"))
        await asyncio.sleep(2)

        assert f.believed() == truth(cluster)
        assert [r.verb for r in port.requests] == ["list", "watch", "list", "watch"]
        assert f.reflector.trouble is None


@virtual
async def test_a_watch_that_breaks_is_followed_by_a_list(cluster: MemCluster) -> None:
    port = cluster.port("p")
    async with following(port) as f:
        await f.reflector.synced.wait()
        await soon()
        cluster.break_watches()
        await soon()
        assert isinstance(f.reflector.trouble, errors.Unavailable)
        cluster.put(CONFIGMAPS, "lab", config("b"))
        await asyncio.sleep(2)

        assert f.reflector.trouble is None
        assert f.believed() == truth(cluster)


@virtual
async def test_a_quiet_watch_is_made_anew_within_five_minutes(cluster: MemCluster) -> None:
    port = cluster.port("p")
    async with following(port) as f:
        await f.reflector.synced.wait()
        await asyncio.sleep(3600)

        lists = sum(request.verb == "list" for request in port.requests)
        assert 3600 / 301 <= lists <= 3600 / 239
        assert f.told == ["added a"]


@virtual
async def test_a_server_that_is_away_is_asked_ever_less_and_found_again(
    cluster: MemCluster,
) -> None:
    port = cluster.port("p")
    cluster.down = True
    async with following(port) as f:
        await asyncio.sleep(600)
        tries = len(port.requests)
        assert 20 <= tries <= 50
        assert isinstance(f.reflector.trouble, errors.Unavailable)
        assert not f.reflector.synced.is_set()
        cluster.down = False
        await asyncio.sleep(31)

        assert f.believed() == truth(cluster)


@virtual
async def test_watches_that_end_at_once_are_never_a_hot_loop(cluster: MemCluster) -> None:
    port = cluster.port("p")
    async with following(port):
        for _ in range(1000):
            await asyncio.sleep(0.6)
            cluster.end_watches()
        asked = len(port.requests)

    assert asked <= 2 * 50


@virtual
@pytest.mark.parametrize(
    "error", [errors.Forbidden("no", code=403), errors.NotServed("no", code=404)]
)
async def test_a_right_that_is_given_soon_is_noticed_soon_and_the_rest_is_asked_for_seldom(
    cluster: MemCluster, error: errors.KubeError
) -> None:
    port = cluster.port("p")
    port.fail(error, verb="list", times=2)
    async with following(port) as f:
        await asyncio.sleep(2)
        assert f.believed() == truth(cluster)
    port.requests.clear()
    port.fail(error, verb="list", times=1000)
    async with following(port) as f:
        await asyncio.sleep(600)
        assert f.reflector.trouble is error
        assert 600 / 30 <= len(port.requests) <= 600 / 15 + 7


@virtual
async def test_a_list_that_lags_behind_is_not_believed(cluster: MemCluster) -> None:
    port = cluster.port("p")
    old = cluster.version
    cluster.put(CONFIGMAPS, "lab", config("b"))
    async with following(port) as f:
        await f.reflector.synced.wait()
        await soon()
        port.stale(old, verb="list", times=2)
        cluster.end_watches()
        await asyncio.sleep(1)

        assert set(f.believed()) == {"a", "b"}
        await asyncio.sleep(30)
        assert f.believed() == truth(cluster)
        assert f.told == ["added a", "added b"]


@virtual
async def test_a_history_that_was_set_back_is_believed_in_the_end(cluster: MemCluster) -> None:
    port = cluster.port("p")
    old = cluster.version
    cluster.put(CONFIGMAPS, "lab", config("b"))
    async with following(port) as f:
        await f.reflector.synced.wait()
        await soon()
        port.read_version = old  # as after a restore from a backup
        port.watch_filter = dropping(lambda event: True, times=100)
        cluster.end_watches()
        await asyncio.sleep(120)

        assert set(f.believed()) == {"a"}


@virtual
async def test_what_the_listener_raises_does_not_stop_the_watch(
    cluster: MemCluster, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def notify(notice: Notice) -> None:
        seen.append(notice.object["metadata"]["name"])
        if seen[-1] == "a":
            raise ValueError("poison")

    reflector = Reflector(cluster.port("p"), CONFIGMAPS, "lab", notify=notify)
    task = asyncio.get_running_loop().create_task(reflector.run())
    await reflector.synced.wait()
    await soon()
    with caplog.at_level(logging.ERROR):
        cluster.put(CONFIGMAPS, "lab", config("b"))
        await soon()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    assert seen == ["a", "b"]


async def test_on_the_wire_a_hasty_server_is_not_hurried() -> None:
    """What the library does here is in `test_client_library`: a thousand times a second."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await stream(request)
        if len(s.seen) > 2:
            return web.Response(text="<html>bad gateway</html>", status=502)
        return answer({"metadata": {"resourceVersion": "5"}, "items": []})

    async with stub(handler) as s:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await Follower(s.client).reflector.run()

    assert len(s.seen) <= 6


async def test_on_the_wire_a_gone_version_is_listed_again() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return answer({"metadata": {"resourceVersion": str(len(s.seen))}, "items": []})
        if request.query["resourceVersion"] == "1":
            return failure(410, "Expired")
        done.set()
        return await stream(request)

    done = asyncio.Event()
    async with stub(handler) as s:
        async with following(s.client), asyncio.timeout(20):
            await done.wait()

    assert [seen.query.get("resourceVersion") for seen in s.seen][:4] == [None, "1", None, "3"]

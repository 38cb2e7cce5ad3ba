"""
The defects of kubernetes-asyncio that `modelpool_kube` is built around, each seen on the wire.

These tests say what the *library* does. When one fails after an upgrade, the library was mended:
see whether the detour that the test names is still needed. What our own client does instead is in
`test_client` and `test_watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio import client as library
from kubernetes_asyncio import config, watch

from apistub import Stub, answer, failure, stream, stub

OBJECT = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "resourceVersion": "7"}}


def api(s: Stub) -> Any:
    """Return the library's client of the stub."""
    return library.ApiClient(library.Configuration(host=s.url))


async def test_a_patch_of_a_custom_resource_is_sent_as_a_json_patch() -> None:
    """Detour: every patch of ours names its content type."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(OBJECT)

    async with stub(handler) as s, api(s) as client:
        await library.CustomObjectsApi(client).patch_namespaced_custom_object(
            "modelpool.dev", "v1alpha1", "lab", "modelpools", "gpu0", {"spec": {"gpu": 2}}
        )

    assert s.seen[0].headers["Content-Type"] == "application/json-patch+json"
    assert isinstance(s.seen[0].body, dict)


async def test_a_call_has_no_time_limit() -> None:
    """Detour: every call of ours has one."""
    release, asked = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.set()
        await release.wait()
        return answer(OBJECT)

    async with stub(handler) as s, api(s) as client:
        session = client.rest_client.pool_manager
        seen: list[Any] = []
        ask = session.request

        async def request(**arguments: Any) -> Any:
            seen.append(arguments["timeout"])
            return await ask(**arguments)

        session.request = request
        call = asyncio.get_running_loop().create_task(
            library.CoreV1Api(client).read_namespaced_pod("a", "lab")
        )
        await asked.wait()
        release.set()
        await call

    assert (seen[0].total, seen[0].sock_read, seen[0].sock_connect) == (None, None, None)


@pytest.mark.parametrize("page", [False, True])
async def test_a_watch_dials_again_without_a_pause(page: bool) -> None:
    """Detour: a reflector of our own, with jittered back-off."""

    many = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if len(s.seen) > 100:
            many.set()
        if page:
            return web.Response(text="<html>bad gateway</html>\n" * 2, status=502)
        return await stream(request)

    async def follow() -> None:
        async with watch.Watch() as watching:
            pods = library.CoreV1Api(client).list_namespaced_pod
            async for event in watching.stream(pods, "lab"):
                # What is no JSON comes out as if it were an event.
                assert isinstance(event, str)

    async with stub(handler) as s, api(s) as client:
        following = asyncio.get_running_loop().create_task(follow())
        async with asyncio.timeout(20):  # far less than a hundred pauses
            await many.wait()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_a_version_that_is_gone_is_asked_for_again_as_it_is() -> None:
    """Detour: on 410 our reflector lists again."""
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, {"type": "ERROR", "object": gone})

    async with stub(handler) as s, api(s) as client:
        with pytest.raises(library.ApiException) as caught:
            async with watch.Watch() as watching:
                pods = library.CoreV1Api(client).list_namespaced_pod
                async for _ in watching.stream(pods, "lab", resource_version="5"):
                    pass

    assert caught.value.status == 410
    assert [seen.query.get("resourceVersion") for seen in s.seen] == ["5", "5"]


async def test_the_dynamic_client_takes_a_refusal_for_an_object() -> None:
    """
    Detour: we look at the status of every answer.

    Raising instead, as later versions do, is as good: nothing of ours uses the dynamic client.
    """
    from kubernetes_asyncio.dynamic import DynamicClient

    group = {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": "pods",
                "kind": "Pod",
                "namespaced": True,
                "singularName": "",
                "verbs": ["get"],
            }
        ],
    }

    async def handler(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/api":
                return answer({"kind": "APIVersions", "versions": ["v1"]})
            case "/apis":
                return answer({"kind": "APIGroupList", "groups": []})
            case "/api/v1":
                return answer(group)
            case "/version":
                return answer({"major": "1", "minor": "37"})
            case _:
                pass
        return failure(404, "NotFound", 'pods "a" not found', name="a")

    async with stub(handler) as s, api(s) as client:
        dynamic = await DynamicClient(client)
        pods = await dynamic.resources.get(api_version="v1", kind="Pod")
        found = await dynamic.get(pods, name="a", namespace="lab")

    assert found.kind == "Status"
    assert found.code == 404


async def test_leader_election_writes_local_time_as_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detour: an elector of our own with UTC, a monotonic deadline, release and jitter."""
    from kubernetes_asyncio.leaderelection import electionconfig, leaderelection
    from kubernetes_asyncio.leaderelection.resourcelock.leaselock import LeaseLock

    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:

        async def handler(request: web.Request) -> web.StreamResponse:
            if request.method == "GET":
                return failure(404, "NotFound", name="l")
            return answer(await request.json())

        async with stub(handler) as s, api(s) as client:
            began = asyncio.Event()

            async def lead() -> None:
                began.set()
                await asyncio.sleep(60)

            async def lost() -> None:
                pass

            lock = LeaseLock("l", "lab", "me", client)
            wanted = electionconfig.Config(
                lock,
                lease_duration=15,
                renew_deadline=10,
                retry_period=2,
                onstarted_leading=lead,
                onstopped_leading=lost,
            )
            running = asyncio.get_running_loop().create_task(
                leaderelection.LeaderElection(wanted).run()
            )
            async with asyncio.timeout(20):
                await began.wait()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    finally:
        monkeypatch.undo()
        time.tzset()

    created = next(seen.body for seen in s.seen if seen.method == "POST")
    written = datetime.strptime(created["spec"]["renewTime"], "%Y-%m-%dT%H:%M:%S.%fZ")
    off = written.replace(tzinfo=UTC) - datetime.now(UTC)
    assert abs(off - timedelta(hours=5, minutes=30)) < timedelta(minutes=1)
    # Nobody releases the Lease at the end.
    assert not [seen for seen in s.seen if seen.method in ("PUT", "PATCH", "DELETE")]


async def test_proxies_of_the_environment_are_always_used() -> None:
    """Detour: a session of our own, which asks first."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(OBJECT)

    async with stub(handler) as s, api(s) as client:
        assert client.rest_client.pool_manager.trust_env is True


async def test_redirects_are_followed_with_the_write() -> None:
    """Detour: our client takes a redirect for no answer."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path != "/elsewhere":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        return answer(OBJECT)

    async with stub(handler) as s, api(s) as client:
        await library.CoreV1Api(client).create_namespaced_pod("lab", OBJECT)

    assert [(seen.method, seen.path) for seen in s.seen][1] == ("POST", "/elsewhere")


async def test_a_kubeconfigs_token_is_never_read_again(tmp_path: Path) -> None:
    """Detour: on 401 our client runs the loader again."""
    loaded = library.Configuration()
    (tmp_path / "token").write_text("one", "utf-8")
    (tmp_path / "config").write_text(
        json.dumps(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"tokenFile": "token"}}],
            }
        ),
        "utf-8",
    )

    await config.load_kube_config(str(tmp_path / "config"), client_configuration=loaded)

    assert loaded.refresh_api_key_hook is None
    assert loaded.api_key["BearerToken"] == "Bearer one"


async def test_a_line_end_in_a_token_file_goes_into_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Detour: our client strips it."""
    (tmp_path / "token").write_text("one\n", "utf-8")
    (tmp_path / "ca").write_text("-", "utf-8")
    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setitem(os.environ, "KUBERNETES_SERVICE_PORT", "1")
    loaded = library.Configuration()

    config.load_incluster_config(
        loaded, token_filename=str(tmp_path / "token"), cert_filename=str(tmp_path / "ca")
    )

    assert loaded.api_key["BearerToken"] == "Bearer one\n"

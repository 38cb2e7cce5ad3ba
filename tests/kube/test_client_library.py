"""
The defects of kubernetes-asyncio that `modelpool_kube` is built around, each seen on the wire.

These tests say what the *library* does. When one fails after an upgrade, the library was mended:
see whether the detour that the test names is still needed. What our own client does instead is in
`test_client` and `test_watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio import client as library
from kubernetes_asyncio import config, watch

import tlspair
from apistub import Stub, answer, failure, stream, stub

OTHER_AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBlTCCATugAwIBAgIUA5XVvejSxqVZK15V6LUnX69VhiMwCgYIKoZIzj0EAwIw
HzEdMBsGA1UEAwwUbW9kZWxwb29sIG90aGVyIHRlc3QwIBcNMjYxMjAxMTczMzI2
WhgPMjEyNjExMDcxNzMzMjZaMB8xHTAbBgNVBAMMFG1vZGVscG9vbCBvdGhlciB0
ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAECm0Eh18EVlHYVn06NvxF2+Cw
dOc9bFigluLXnAcwnId+UYuSeqL/HQs5ucldaHq0jjXLZMosbjiiGiTbgznR4aNT
MFEwHQYDVR0OBBYEFA8PFcC0sB6wpGpFmxG8WyvHEQyvMB8GA1UdIwQYMBaAFA8P
FcC0sB6wpGpFmxG8WyvHEQyvMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwID
SAAwRQIhAImw5is00acOTxdKIc+RR9oFWTsnKCUS9z9tHptu8629AiBs8gpVdShb
jqEdMMew7RQ/OYjbBnzQirbb/lDKLKHSLg==
-----END CERTIFICATE-----
"""
"""An authority that signed nothing here."""
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


def election(client: Any, work: Callable[[], Any], stopped: Callable[[], Any]) -> Any:
    """Return an election of the library's."""
    from kubernetes_asyncio.leaderelection import electionconfig, leaderelection
    from kubernetes_asyncio.leaderelection.resourcelock.leaselock import LeaseLock

    wanted = electionconfig.Config(
        LeaseLock("l", "lab", "me", client),
        lease_duration=15,
        renew_deadline=10,
        retry_period=2,
        onstarted_leading=work,
        onstopped_leading=stopped,
    )
    return leaderelection.LeaderElection(wanted)


async def test_a_broken_connection_ends_leader_election_and_the_work_goes_on() -> None:
    """Detour: our keeper takes every failure for a try, and asks `is_held` before each act."""
    leads, ends = asyncio.Event(), asyncio.Event()
    stopped: list[bool] = []

    async def work() -> None:
        leads.set()
        await ends.wait()

    async def stop() -> None:
        stopped.append(True)

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and len(s.seen) == 1:
            return failure(404, "NotFound", name="l")
        if request.method == "POST":
            return answer(await request.json())
        await leads.wait()
        assert request.transport is not None
        request.transport.abort()
        return answer({})

    async with stub(handler) as s, api(s) as client:
        before = asyncio.all_tasks()
        with pytest.raises(aiohttp.ClientError):
            await election(client, work, stop).run()
        left = [each for each in asyncio.all_tasks() - before if each.get_coro().__name__ == "work"]  # type: ignore[union-attr]

        assert stopped == []
        assert len(left) == 1 and not left[0].done()
        ends.set()
        await left[0]


async def test_leader_election_cannot_write_a_whole_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Detour: our Leases always carry six digits, and are never read for their times."""
    from kubernetes_asyncio.leaderelection.leaderelectionrecord import LeaderElectionRecord
    from kubernetes_asyncio.leaderelection.resourcelock.leaselock import LeaseLock

    async with library.ApiClient(library.Configuration(host="http://127.0.0.1:1")) as client:
        lock = LeaseLock("l", "lab", "me", client)
        now = str(datetime(2026, 1, 2, 3, 4, 5, 0))
        spec = lock.update_lease(LeaderElectionRecord("me", "15", now, now))

    assert spec.holder_identity == "me"
    assert (spec.acquire_time, spec.renew_time) == (None, None)
    assert "Failed to parse time string" in caplog.text


async def test_a_certificate_authority_is_read_once_for_ever(tmp_path: Path) -> None:
    """Detour: on a certificate that is not trusted our client reads the files again."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(OBJECT)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=tlspair.server_context())
    try:
        authority = tmp_path / "ca.crt"
        authority.write_text(OTHER_AUTHORITY, "utf-8")
        configuration = library.Configuration(host=f"https://localhost:{server.port}")
        configuration.ssl_ca_cert = str(authority)
        async with library.ApiClient(configuration) as client:
            pods = library.CoreV1Api(client)
            for _ in range(2):
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await pods.read_namespaced_pod("a", "lab")
                authority.write_text(tlspair.certificate(), "utf-8")
        # The file is right; only a client that is made anew finds that out.
        async with library.ApiClient(configuration) as client:
            assert (await library.CoreV1Api(client).read_namespaced_pod("a", "lab")) is not None
    finally:
        await server.close()


async def test_a_watch_asks_for_no_bookmarks() -> None:
    """Detour: our watches do, so that the version of a quiet one does not grow too old."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, {"type": "ADDED", "object": OBJECT})

    async with stub(handler) as s, api(s) as client, watch.Watch() as watching:
        pods = library.CoreV1Api(client).list_namespaced_pod
        async for _ in watching.stream(pods, "lab", timeout_seconds=1):
            pass

    assert s.seen[0].query["watch"] == "True"
    assert "allowWatchBookmarks" not in s.seen[0].query


def test_a_kubeconfig_is_written_back_unless_forbidden() -> None:
    """Detour: we forbid it; a file that we were shown is not ours to edit."""
    assert inspect.signature(config.load_kube_config).parameters["persist_config"].default is True


async def test_certificates_are_checked_as_strictly_as_python_likes() -> None:
    """Detour: our contexts take certificates without a key identifier, as other clients do."""
    async with library.ApiClient(library.Configuration(host="https://127.0.0.1:1")) as client:
        context = client.rest_client.pool_manager.connector._ssl

    mine = ssl.create_default_context()
    assert context.verify_flags == mine.verify_flags  # strict from Python 3.13 on


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

"""The client on the wire: time limits, content types, what each answer means."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import tlspair
from apistub import StubCredentials, answer, cut, failure, stream, stub
from modelpool_kube import errors
from modelpool_kube.client import KubeClient, connect
from modelpool_kube.kinds import DEPLOYMENTS, LEASES, MODEL_POOLS, NODES, PODS
from modelpool_kube.port import Change, ClusterPort, WatchEvent

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "resourceVersion": "5"}}


def as_port(client: KubeClient) -> ClusterPort:
    """Return *client* as what reconcilers see; mypy checks that it fits."""
    return client


async def collect(client: KubeClient, **options: Any) -> list[WatchEvent]:
    """Return all events of one watch."""
    return [each async for each in client.watch(PODS, "lab", since="1", **options)]


async def test_an_object_is_read_from_its_path() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(POD)

    async with stub(handler) as s:
        port = as_port(s.client)
        assert await port.get(PODS, "lab", "a") == POD
        await port.get(NODES, None, "n1")
        await port.get(MODEL_POOLS, "lab", "gpu0")

    assert [seen.path for seen in s.seen] == [
        "/api/v1/namespaces/lab/pods/a",
        "/api/v1/nodes/n1",
        "/apis/modelpool.dev/v1alpha1/namespaces/lab/modelpools/gpu0",
    ]
    assert s.seen[0].headers["Authorization"] == "Bearer one"
    assert "resourceVersion" not in s.seen[0].query


async def test_a_list_is_read_page_by_page_and_its_items_know_their_kind() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.query.get("continue") == "next":
            return answer({"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {}}]})
        items = [{"metadata": {"name": "a"}}]
        return answer({"metadata": {"resourceVersion": "9", "continue": "next"}, "items": items})

    async with stub(handler) as s:
        found = await s.client.list(PODS, "lab", labels="app=x", fields="spec.nodeName=n")

    assert found.version == "9"
    assert found.items[0] == {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    assert len(found.items) == 2
    assert s.seen[1].query["labelSelector"] == "app=x"
    assert s.seen[1].query["fieldSelector"] == "spec.nodeName=n"
    assert all("resourceVersion" not in seen.query for seen in s.seen)


async def test_a_list_whose_pages_expire_is_read_from_the_start() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls == 2:
            return failure(410, "Expired")
        more = {} if calls > 3 else {"continue": "next"}
        return answer({"metadata": {"resourceVersion": "9", **more}, "items": [POD]})

    async with stub(handler) as s:
        found = await s.client.list(PODS, "lab")

    assert len(found.items) == 2
    assert ["continue" in seen.query for seen in s.seen] == [False, True, False, True]


async def test_every_patch_names_its_content_type_and_its_author() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(POD)

    async with stub(handler) as s:
        body = {"spec": {"replicas": 0}, "metadata": {"annotations": {"a": "b"}}}
        await s.client.patch_merge(DEPLOYMENTS, "lab", "coder", body, version="77")
        await s.client.patch_status(MODEL_POOLS, "lab", "gpu0", {"status": {"phase": "Ready"}})
        await s.client.patch_json(PODS, "lab", "a", [{"op": "test", "path": "/a", "value": 1}])
        await s.client.apply(PODS, "lab", "a", POD)

    assert [seen.headers["Content-Type"] for seen in s.seen] == [
        "application/merge-patch+json",
        "application/merge-patch+json",
        "application/json-patch+json",
        "application/apply-patch+yaml",
    ]
    assert {seen.query["fieldManager"] for seen in s.seen} == {"tests"}
    assert s.seen[0].body == {
        "spec": {"replicas": 0},
        "metadata": {"annotations": {"a": "b"}, "resourceVersion": "77"},
    }
    assert s.seen[1].path.endswith("/modelpools/gpu0/status")
    assert s.seen[3].query["force"] == "false"
    assert body == {"spec": {"replicas": 0}, "metadata": {"annotations": {"a": "b"}}}


async def test_a_delete_carries_its_preconditions() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return answer({"kind": "Status", "status": "Success"})

    async with stub(handler) as s:
        await s.client.delete(PODS, "lab", "a", uid="u1", version="5", grace_s=0)
        await s.client.delete(PODS, "lab", "a")

    assert s.seen[0].body["preconditions"] == {"uid": "u1", "resourceVersion": "5"}
    assert s.seen[0].body["gracePeriodSeconds"] == 0
    assert s.seen[0].body["propagationPolicy"] == "Background"
    assert "preconditions" not in s.seen[1].body


@pytest.mark.parametrize(
    ("response", "read", "write"),
    [
        ((404, "NotFound", {"name": "a", "kind": "pods"}), errors.NotFound, errors.NotFound),
        ((404, "NotFound", {}), errors.NotServed, errors.NotServed),
        ((409, "AlreadyExists", {}), errors.AlreadyExists, errors.AlreadyExists),
        ((409, "Conflict", {}), errors.Conflict, errors.Conflict),
        ((410, "Expired", {}), errors.Gone, errors.Gone),
        ((403, "Forbidden", {}), errors.Forbidden, errors.Forbidden),
        ((401, "Unauthorized", {}), errors.Unauthorized, errors.Unauthorized),
        ((422, "Invalid", {}), errors.Invalid, errors.Invalid),
        ((400, "BadRequest", {}), errors.Invalid, errors.Invalid),
        ((405, "MethodNotAllowed", {}), errors.Refused, errors.Refused),
        ((429, "TooManyRequests", {}), errors.Unavailable, errors.Unavailable),
        ((500, "InternalError", {}), errors.Unavailable, errors.Unanswered),
        ((503, "ServiceUnavailable", {}), errors.Unavailable, errors.Unanswered),
        ((504, "Timeout", {}), errors.Unavailable, errors.Unanswered),
    ],
)
async def test_what_an_answer_means(
    response: tuple[int, str, dict[str, str]],
    read: type[errors.KubeError],
    write: type[errors.KubeError],
) -> None:
    code, reason, details = response

    async def handler(request: web.Request) -> web.StreamResponse:
        return failure(code, reason, "because", **details)

    async with stub(handler) as s:
        with pytest.raises(errors.KubeError) as read_error:
            await s.client.get(PODS, "lab", "a")
        with pytest.raises(errors.KubeError) as write_error:
            await s.client.create(PODS, "lab", POD)

    assert type(read_error.value) is read
    assert type(write_error.value) is write
    assert read_error.value.code == code
    assert read_error.value.reason == reason
    assert str(read_error.value) == "GET /api/v1/namespaces/lab/pods/a: because"


async def test_a_failure_inside_a_200_is_a_failure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = failure(404, "NotFound", name="a")
        response.set_status(200)
        return response

    async with stub(handler) as s:
        with pytest.raises(errors.NotFound):
            await s.client.get(PODS, "lab", "a")


@pytest.mark.parametrize("body", ["<html>sorry</html>", "", "[]", '{"kind":'])
async def test_a_proxys_page_is_no_answer(body: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, content_type="text/html")

    async with stub(handler) as s:
        with pytest.raises(errors.Unavailable):
            await s.client.get(PODS, "lab", "a")
        with pytest.raises(errors.Unanswered):
            await s.client.patch_merge(PODS, "lab", "a", {})


async def test_a_missing_kind_is_told_from_a_missing_object() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text="404 page not found\n", status=404)

    async with stub(handler) as s:
        with pytest.raises(errors.NotServed, match="404 page not found"):
            await s.client.list(MODEL_POOLS, "lab")


async def test_a_server_that_is_not_there_wrote_nothing() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        credentials = StubCredentials(f"http://127.0.0.1:{held.getsockname()[1]}")
        async with KubeClient(credentials, manager="tests") as client:
            with pytest.raises(errors.Unavailable):
                await client.create(PODS, "lab", POD)
            with pytest.raises(errors.Unavailable):
                await client.get(PODS, "lab", "a")


async def test_a_write_that_is_cut_off_may_have_happened() -> None:
    async with stub(cut) as s:
        with pytest.raises(errors.Unanswered):
            await s.client.create(PODS, "lab", POD)
        with pytest.raises(errors.Unavailable):
            await s.client.get(PODS, "lab", "a")


async def test_every_call_has_a_time_limit() -> None:
    release = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return answer(POD)

    async with stub(handler, call_timeout_s=0.1) as s:
        with pytest.raises(errors.Timeout, match=r"no answer within 0\.1 s"):
            await s.client.get(PODS, "lab", "a")
        with pytest.raises(errors.Unanswered, match=r"no answer within 0\.1 s"):
            await s.client.patch_merge(PODS, "lab", "a", {})
        with pytest.raises(errors.Timeout):
            await collect(s.client)
        release.set()


async def test_a_half_sent_answer_is_none() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"kind":')
        return await cut(request)

    async with stub(handler) as s:
        with pytest.raises(errors.Unanswered):
            await s.client.patch_merge(PODS, "lab", "a", {})


async def test_credentials_are_read_again_once_when_they_are_not_accepted() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] == "Bearer old":
            return failure(401, "Unauthorized")
        return answer(POD)

    async with stub(handler) as s:
        s.credentials.tokens = ["old", "new"]
        found = await asyncio.gather(*(s.client.get(PODS, "lab", "a") for _ in range(5)))

    assert found == [POD] * 5
    assert s.credentials.reloads == 1


async def test_credentials_that_stay_refused_are_not_tried_for_ever() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return failure(401, "Unauthorized")

    async with stub(handler) as s:
        with pytest.raises(errors.Unauthorized):
            await s.client.create(PODS, "lab", POD)

    assert len(s.seen) == 2


async def test_a_redirect_is_not_followed() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async with stub(handler) as s:
        with pytest.raises(errors.Unanswered):
            await s.client.create(PODS, "lab", POD)

    assert [seen.path for seen in s.seen] == ["/api/v1/namespaces/lab/pods"]


async def test_proxies_of_the_environment_are_used_only_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(POD)

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    async with stub(handler) as s:
        assert await s.client.get(PODS, "lab", "a") == POD
    async with stub(handler, trust_env=True) as s:
        with pytest.raises(errors.Unavailable):
            await s.client.get(PODS, "lab", "a")


async def test_when_the_server_asks_to_wait_the_error_says_how_long() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = failure(429, "TooManyRequests")
        response.headers["Retry-After"] = "7"
        return response

    async with stub(handler) as s:
        with pytest.raises(errors.Unavailable) as caught:
            await s.client.create(PODS, "lab", POD)

    assert caught.value.retry_after_s == 7.0


def added(name: str, version: str) -> dict[str, Any]:
    """Return an event as the wire has it."""
    return {"type": "ADDED", "object": {"metadata": {"name": name, "resourceVersion": version}}}


async def test_a_watch_asks_for_bookmarks_and_a_limit_and_ends_with_the_server() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, added("a", "7"), bookmark, end=b'{"type":"ADDED","obj')

    async with stub(handler) as s:
        events = await collect(s.client, labels="app=x", timeout_s=250)

    assert [event.change for event in events] == [Change.ADDED, Change.BOOKMARK]
    assert s.seen[0].query == {
        "watch": "1",
        "resourceVersion": "1",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "250",
        "labelSelector": "app=x",
    }


async def test_events_of_any_size_and_cut_are_put_together() -> None:
    big = added("a", "7")
    big["object"]["data"] = "x" * 3_000_000
    raw = json.dumps(big).encode() + b"\n\n" + json.dumps(added("b", "8")).encode() + b"\n"

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(raw), 700_001):
            await response.write(raw[start : start + 700_001])
        return response

    async with stub(handler) as s:
        events = await collect(s.client)

    assert [event.object["metadata"]["name"] for event in events] == ["a", "b"]
    assert len(events[0].object["data"]) == 3_000_000


@pytest.mark.parametrize("inside", [True, False])
async def test_a_version_that_is_too_old_is_gone(inside: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if inside:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            return await stream(request, {"type": "ERROR", "object": status})
        return failure(410, "Expired", "too old")

    async with stub(handler) as s:
        with pytest.raises(errors.Gone, match="too old"):
            await collect(s.client)


@pytest.mark.parametrize(
    "lines", [b"<html>\n", b"[]\n", b'{"type":"X","object":{}}\n', b'{"type":"ADDED"}\n', b'"x"\n']
)
async def test_what_is_no_event_ends_the_watch_with_an_error(lines: bytes) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, end=lines)

    async with stub(handler) as s:
        with pytest.raises(errors.Unavailable):
            await collect(s.client)


async def test_a_watch_that_is_refused_says_why() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return failure(403, "Forbidden", "you may not")

    async with stub(handler) as s:
        with pytest.raises(errors.Forbidden, match="WATCH .*you may not"):
            await collect(s.client)


async def test_a_watch_that_falls_silent_ends_after_the_servers_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = asyncio.Event()
    monkeypatch.setattr("modelpool_kube.client.WATCH_MARGIN_S", 0.05)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(json.dumps(added("a", "7")).encode() + b"\n")
        await release.wait()
        return response

    async with stub(handler) as s:
        events = []
        with pytest.raises(errors.Timeout, match="fell silent"):
            async for event in s.client.watch(PODS, "lab", since="1", timeout_s=0.1):
                events.append(event)
        release.set()

    assert len(events) == 1


async def test_a_watch_that_is_left_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        transport = request.transport
        assert transport is not None
        try:
            for version in range(7, 10_000):
                await response.write(json.dumps(added("a", str(version))).encode() + b"\n")
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.CancelledError):
            closed.set()
            raise
        return response

    async with stub(handler) as s:
        watching = s.client.watch(PODS, "lab", since="1")
        async with contextlib.aclosing(watching):
            async for _ in watching:
                break
        async with asyncio.timeout(20):
            await closed.wait()


@contextlib.asynccontextmanager
async def secured(app: web.Application) -> AsyncIterator[TestServer]:
    """Serve *app* with a certificate that only tests trust."""
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=tlspair.server_context())
    try:
        yield server
    finally:
        await server.close()


class RotatedAuthority(StubCredentials):
    """Trusts the authority of the server only after its files were read again."""

    def tls(self) -> ssl.SSLContext | None:
        """Return a context made from the files as they are."""
        return tlspair.client_context() if self.reloads else ssl.create_default_context()


async def test_a_rotated_certificate_authority_is_found_and_nothing_was_sent_before() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.method)
        return answer(POD)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with secured(app) as server:
        credentials = RotatedAuthority(f"https://localhost:{server.port}")
        async with KubeClient(credentials, manager="tests") as client:
            with pytest.raises(errors.Unavailable, match="ertificate"):
                await client.create(PODS, "lab", POD)
            assert asked == []
            assert await client.create(PODS, "lab", POD) == POD
            assert credentials.reloads == 1


async def test_an_authority_that_stays_wrong_is_not_looked_for_all_the_time() -> None:
    app = web.Application()
    async with secured(app) as server:
        credentials = StubCredentials(f"https://localhost:{server.port}")
        async with KubeClient(credentials, manager="tests") as client:
            for _ in range(5):
                with pytest.raises(errors.Unavailable):
                    await client.get(PODS, "lab", "a")

    assert credentials.reloads == 1


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "%s"}}]
users: [{name: u, user: {tokenFile: token}}]
"""


async def test_a_kubeconfig_is_found_and_its_token_read_again(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] != "Bearer fresh":
            return failure(401, "Unauthorized")
        return answer(POD)

    async with stub(handler) as s:
        (tmp_path / "config").write_text(KUBECONFIG % s.url, "utf-8")
        (tmp_path / "token").write_text("stale\n", "utf-8")
        config = str(tmp_path / "config")
        async with await connect(manager="tests", kubeconfig=config) as client:
            (tmp_path / "token").write_text("fresh\n", "utf-8")
            assert await client.get(LEASES, "lab", "a") == POD


@pytest.mark.parametrize("content", [None, "", "a: b", ":", KUBECONFIG.replace("here, c", "x, c")])
async def test_a_kubeconfig_that_is_none_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content, "utf-8")

    with pytest.raises(errors.Unavailable, match="no usable credentials in .*config"):
        await connect(manager="tests", kubeconfig=str(path))


@pytest.fixture
def in_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A service account as the kubelet mounts it; the path of its token."""
    from kubernetes_asyncio.config import incluster_config

    token = tmp_path / "token"
    token.write_text("one\n", "utf-8")
    (tmp_path / "ca.crt").write_text("-", "utf-8")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr("modelpool_kube.credentials.TOKEN_FILE", token)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    yield token


async def test_inside_a_pod_a_broken_certificate_file_is_noticed_at_once(in_pod: Path) -> None:
    with pytest.raises(errors.Unavailable, match="no usable credentials in this Pod"):
        await connect(manager="tests")


async def test_inside_a_pod_the_token_file_is_read_every_minute(
    in_pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool_kube.credentials._FoundCredentials.tls", lambda self: None)
    async with await connect(manager="tests") as client:
        first = await client._credentials.headers()
        in_pod.write_text("two\n", "utf-8")
        young = await client._credentials.headers()
        monkeypatch.setattr("modelpool_kube.credentials.TOKEN_AGE_S", 0.0)
        old = await client._credentials.headers()

    assert client._credentials.host == "https://127.0.0.1:6443"
    assert first == young == {"Authorization": "Bearer one"}
    assert old == {"Authorization": "Bearer two"}

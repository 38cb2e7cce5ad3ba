"""HTTP and streaming through a proxy, as users of such routers have reported them going wrong."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import http.server
import json
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelpool_router.web.coding import zstd
from rawclient import RawClient
from rawupstream import LAST_CHUNK, STREAM_HEAD, Link, RawUpstream, SeenRequest, answer, chunk
from scripted import Life, Recorder, scripted, scripted_pool
from served import Served

CHAT = "/v1/chat/completions"
FAMILIES = {
    "chat": CHAT,
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}


def raw_post(body: bytes, *fields: str, path: str = CHAT, version: str = "1.1") -> bytes:
    """Return a request as bytes."""
    lines = [f"POST {path} HTTP/{version}", "Host: a", *fields, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_streams_are_passed_on_event_by_event(tmp_path: Path) -> None:
    """Nothing is kept back, here or by a proxy in front, also after a hold."""
    taken = asyncio.Semaphore(0)

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD)
        for number in range(5):
            await link.send(chunk(b'data: {"n":%d}\n\n' % number))
            await taken.acquire()  # not before the client has the last one
        await link.send(LAST_CHUNK)
        return False

    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=engine) as router:
        for name in ("alpha", "alpha", "beta"):
            async with router.stream(name) as stream:
                assert stream.headers["X-Accel-Buffering"] == "no"
                assert "no-cache" in stream.headers["Cache-Control"]
                for number in range(5):
                    assert await stream.next() == json.dumps({"n": number}, separators=(",", ":"))
                    taken.release()
                assert await stream.next() is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("half", [b'data: {"half', b"event: x\n", b'data: {"whole":1}\n', b""])
async def test_a_stream_that_dies_ends_with_an_event_of_its_family(
    tmp_path: Path, family: str, half: bytes
) -> None:
    """The error is a frame of its own, also where the engine died in the middle of one."""

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(STREAM_HEAD + chunk(b'data: {"n":1}\n\n' + half))
        link.reset()
        return False

    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        got = await router.chat("alpha", path=FAMILIES[family], stream=True)
        assert got.status == 200
        assert got.body.startswith(b'data: {"n":1}\n\n' + half)
        last = got.body.rstrip(b"\n").split(b"\n\n")[-1].decode().split("\n")
        fields = dict(line.split(": ", 1) for line in last)
        data = json.loads(fields["data"])
        match family:
            case "messages":
                assert (fields["event"], data["type"]) == ("error", "error")
                error = data["error"]
            case "responses":
                assert (fields["event"], data["type"]) == ("response.failed",) * 2
                assert data["response"]["status"] == "failed"
                error = data["response"]["error"]
            case _:
                error = data["error"]
        assert error["code"] == "upstream_reset" and error["message"]
        assert b"[DONE]" not in got.body


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "not asked for"])
async def test_compressed_answers_arrive_as_they_were_sent(tmp_path: Path, asked: bool) -> None:
    """Never half: the bytes and the label stay together, whatever the framing."""
    text = json.dumps({"squares": [number * number for number in range(500)]}).encode()
    packed = gzip.compress(text)
    kind, coding = b"Content-Type: application/json", b"Content-Encoding: gzip"
    events = gzip.compress(b'data: {"n":1}\n\ndata: [DONE]\n\n')
    answers = {
        "length": answer(packed, kind, coding),
        "chunks": b"HTTP/1.1 200 OK\r\n%b\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n"
        % (kind, coding)
        + chunk(packed[:50])
        + chunk(packed[50:])
        + LAST_CHUNK,
        "events": STREAM_HEAD.replace(b"\r\n\r\n", b"\r\n%b\r\n\r\n" % coding)
        + chunk(events)
        + LAST_CHUNK,
        "twice": answer(gzip.compress(packed), kind, b"Content-Encoding: gzip, gzip"),
    }
    seen: list[SeenRequest] = []

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        seen.append(request)
        await link.send(answers[json.loads(request.body)["how"]])
        return False

    headers = {"Accept-Encoding": "gzip"} if asked else {"Accept-Encoding": "identity"}
    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        for how in answers:
            got = await router.chat("alpha", how=how, headers=headers)
            if how == "twice":
                assert got.headers["Content-Encoding"] == "gzip, gzip"
                assert gzip.decompress(gzip.decompress(got.body)) == text
            else:
                assert got.headers["Content-Encoding"] == "gzip"
                plain = gzip.decompress(got.body)
                assert plain == (gzip.decompress(events) if how == "events" else text)
        sent = [request.values("accept-encoding") for request in seen]
        assert sent == [[headers["Accept-Encoding"]]] * 4


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate"])
async def test_compressed_requests_are_read_and_not_scanned(tmp_path: Path, coding: str) -> None:
    """Small or big: the model is the true one, and the engine gets JSON without a label."""
    packers: dict[str, Callable[[bytes], bytes]] = {
        "zstd": zstd.compress,
        "gzip": gzip.compress,
        "deflate": zlib.compress,
    }
    pack = packers[coding]
    engine = Recorder()
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=engine) as router:
        bodies = [
            json.dumps({"model": name, "decoy": '"model":"alpha"' + "z" * size}).encode()
            for name, size in (("beta", 5), ("alpha", 40_000), ("beta", 3_000_000))
        ]
        for body in bodies:
            labelled = {"Content-Encoding": coding}
            got = await router.chat("", data=pack(body), headers=labelled)
            assert (got.status, got.member) == (200, json.loads(body)["model"])
        assert [request.body for request in engine.requests] == bodies
        for request in engine.requests:
            assert request.values("content-encoding") == []
            assert request.values("content-length") == [str(len(request.body))]
        stacked = await router.chat(
            "", data=pack(pack(bodies[0])), headers={"Content-Encoding": f"{coding}, {coding}"}
        )
        assert (stacked.status, stacked.code) == (415, "unsupported_media_type")


async def test_a_websocket_is_refused_and_the_client_falls_back(tmp_path: Path) -> None:
    """A clean refusal that starts nothing; then the compressed POST is served."""
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=Recorder()) as router:
        async with router.raw() as client:
            await client.send(
                b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n"
                b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            refused = await client.answer()
        assert refused.status == 426
        assert refused.json()["error"]["code"] == "upgrade_required"
        assert not router.driver().calls or router.driver().count("activate") == 0
        body = zstd.compress(json.dumps({"model": "beta", "input": "x"}).encode())
        got = await router.chat(
            "", path="/v1/responses", data=body, headers={"Content-Encoding": "zstd"}
        )
        assert (got.status, got.member) == (200, "beta")


async def test_a_body_over_the_limit_can_be_read_about(tmp_path: Path) -> None:
    """A client that is still sending when it is refused learns of the 413, not of a reset."""
    body = json.dumps({"model": "alpha", "x": "y" * (16 << 20)}).encode()
    engine = Recorder()
    async with scripted(
        tmp_path, scripted_pool("alpha"), answerer=engine, maxBodyBytes="4MiB"
    ) as router:

        def with_the_standard_library() -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(*router.address, timeout=20)
            try:
                connection.request("POST", CHAT, body)
                response = connection.getresponse()
                return response.status, response.read()
            finally:
                connection.close()

        status, text = await asyncio.to_thread(with_the_standard_library)
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_too_large")
        if curl := shutil.which("curl"):
            (tmp_path / "body").write_bytes(body)
            program = await asyncio.create_subprocess_exec(
                *(curl, "-sS", "--data-binary", f"@{tmp_path / 'body'}", "-w", "\n%{http_code}"),
                *("-H", "Expect:", router.url + CHAT),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await program.communicate()
            assert program.returncode == 0, err
            assert out.endswith(b"\n413") and b"request_too_large" in out
        assert not engine.seen
        async with router.raw() as client:
            await client.send(
                raw_post(json.dumps({"model": "alpha", "x": "y" * 3_000_000}).encode())
            )
            assert (await client.answer()).status == 200


async def test_an_upstream_that_drops_kept_connections_is_no_failure(tmp_path: Path) -> None:
    """It promises keep-alive and closes after a moment; requests meet that at every phase."""
    closed = 0

    async def engine(link: Link) -> None:
        nonlocal closed
        while True:
            try:
                async with asyncio.timeout(0.008 if link.requests else None):
                    head = await link.read_head()
            except TimeoutError:
                closed += 1
                return
            if head is None:
                return
            seen = SeenRequest(head, b"")
            await link.reader.readexactly(int(seen.values("content-length")[0]))
            link.requests.append(seen)
            await link.send(answer(b"{}", b"Connection: keep-alive"))

    async with RawUpstream(engine) as upstream:
        static = [{"name": "flaky", "url": f"http://127.0.0.1:{upstream.port}"}]
        async with scripted(tmp_path, upstreams=static) as router:
            for number in range(150):
                got = await router.chat("flaky")
                assert got.status == 200, number
                await asyncio.sleep((0.0, 0.006, 0.007, 0.008, 0.009, 0.02)[number % 6])
            assert len(upstream.requests) == 150
            assert len(upstream.links) > 20, "connections were dropped"
            assert len(upstream.links) < 150, "and some were used again"


async def test_a_generation_is_never_begun_twice(tmp_path: Path) -> None:
    """An engine that did the work and broke off without an answer is not asked again."""
    worked = 0

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        nonlocal worked
        worked += 1
        link.close()
        return False

    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        for expected in (1, 2, 3):
            got = await router.chat("alpha")
            assert (got.status, got.code) == (502, "upstream_reset")
            assert worked == expected


async def test_who_waits_for_100_gets_it_also_on_a_cold_pool(tmp_path: Path) -> None:
    """.NET and others send no body before; the engine never sees the expectation."""
    engine = Recorder()
    async with scripted(tmp_path, scripted_pool("alpha", "beta"), answerer=engine) as router:
        body = b'{"model":"alpha"}'
        head, _, _ = raw_post(body, "Expect: 100-continue").partition(b"\r\n\r\n")
        async with router.raw() as client:
            await client.send(head + b"\r\n\r\n")
            assert (await client.answer()).status == 100
            assert router.driver().count("activate") == 0, "no demand before the body is read"
            await client.send(body)
            assert (await client.answer()).status == 200
        assert engine.requests[0].values("expect") == []


async def test_hop_by_hop_lines_stay_on_their_hop(tmp_path: Path) -> None:
    """In both directions, with those that `Connection` names; and the connection stays usable."""
    seen: list[SeenRequest] = []

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        seen.append(request)
        lines = (
            b"Connection: close, X-Inner",
            b"X-Inner: 1",
            b"Keep-Alive: timeout=5",
            b"Proxy-Authenticate: Basic",
            b"X-Custom: kept",
        )
        await link.send(answer(b"{}", *lines))
        return False

    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        async with router.raw() as client:
            for _ in range(2):
                await client.send(
                    raw_post(
                        b'{"model":"alpha"}',
                        "Connection: keep-alive, X-Foo",
                        "X-Foo: 1",
                        "TE: trailers",
                        "Proxy-Connection: keep-alive",
                        "Keep-Alive: 300",
                        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                    )
                )
                got = await client.answer()
                assert (got.status, got.closing) == (200, False)
                names = [name.lower() for name, _ in got.headers]
                assert not {"x-inner", "keep-alive", "proxy-authenticate"} & set(names)
                assert got.header("x-custom") == "kept"
        for request in seen:
            names = [name for name, _ in request.fields]
            hop = {"x-foo", "te", "proxy-connection", "keep-alive", "transfer-encoding"}
            assert not hop & set(names)
            assert "traceparent" in names


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_each_framing_of_an_engine_suits_each_client(tmp_path: Path, version: str) -> None:
    """Chunked, with a length, or until the end: every client can tell where it ends."""
    answers = {
        "chunks": STREAM_HEAD + chunk(b"data: 1\n\n") + LAST_CHUNK,
        "length": answer(b"data: 1\n\n", b"Content-Type: text/event-stream"),
        "close": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n",
        "empty": b"HTTP/1.1 204 No Content\r\n\r\n",
    }

    async def engine(life: Life, link: Link, request: SeenRequest) -> bool:
        await link.send(answers[json.loads(request.body)["how"]])
        return False

    async with scripted(tmp_path, scripted_pool("alpha"), answerer=engine) as router:
        for how in answers:
            body = json.dumps({"model": "alpha", "how": how}).encode()
            async with router.raw() as client:
                await client.send(raw_post(body, version=version))
                got = await client.answer()
                assert got.status == (204 if how == "empty" else 200)
                assert got.body == (b"" if how == "empty" else b"data: 1\n\n")
                if version == "1.0":
                    assert got.header("transfer-encoding") is None
                    assert await client.ended() == b""
                else:
                    assert not got.closing
                    await client.send(raw_post(body))
                    assert (await client.answer()).status == got.status


@pytest.mark.parametrize("served_model", ["a-much-longer-name", "m", "müller-7b", 'quo"ted'])
async def test_a_renamed_model_keeps_the_framing_right(tmp_path: Path, served_model: str) -> None:
    """One length, and it is the body's, whatever the engine wants to read."""
    engine = Recorder()
    pool = scripted_pool("alpha")
    pool["members"][0]["servedModel"] = served_model
    async with scripted(tmp_path, pool, answerer=engine) as router:
        for raw in (
            b'{"model":"alpha","messages":[{"role":"user","content":"alpha \xc3\xbc"}]}',
            b'{ "x" : {"model":"alpha"} , "model" : "\\u0061lpha" }',
        ):
            assert (await router.chat("", data=raw)).status == 200
            request = engine.requests[-1]
            assert request.values("content-length") == [str(len(request.body))]
            expected = {**json.loads(raw), "model": served_model}
            assert json.loads(request.body) == expected


class _Picky(http.server.BaseHTTPRequestHandler):
    """Reads as simple servers do: `int(headers["Content-Length"])`, or it crashes."""

    protocol_version = "HTTP/1.1"
    read: list[tuple[str, str, bytes]]

    def do_POST(self) -> None:
        assert len(self.headers.get_all("Content-Length", [])) == 1
        assert "Transfer-Encoding" not in self.headers
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.read.append((self.command, self.path, body))
        self._reply()

    def do_GET(self) -> None:
        self.read.append((self.command, self.path, b""))
        self._reply()

    def _reply(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def picky_server() -> Iterator[tuple[int, list[tuple[str, str, bytes]]]]:
    """Run the simplest of servers; yield its port and what it read."""
    read: list[tuple[str, str, bytes]] = []
    handler = type("Handler", (_Picky,), {"read": read})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1], read
        finally:
            server.shutdown()
            thread.join()


async def test_the_simplest_of_servers_understands_every_request(tmp_path: Path) -> None:
    with picky_server() as (port, read):
        static = [{"name": "mlx", "url": f"http://127.0.0.1:{port}"}]
        async with scripted(tmp_path, upstreams=static, passthrough=True) as router:
            body = b'{"model":"mlx"}'
            got = [
                await router.chat("mlx", path=path)
                for path in (*FAMILIES.values(), "/v1/rerank", "/tokenize")
            ]
            packed = {"Content-Encoding": "gzip"}
            got.append(await router.chat("", data=gzip.compress(body), headers=packed))
            form = b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\nmlx\r\n--x--\r\n"
            multipart = {"Content-Type": "multipart/form-data; boundary=x"}
            path = "/v1/audio/transcriptions"
            got.append(await router.chat("", path=path, data=form, headers=multipart))
            got.append(await router.get("/upstream/mlx/props"))
            async with router.raw() as client:
                chunks = b"5\r\n" + body[:5] + b"\r\na\r\n" + body[5:] + b"\r\n0\r\n\r\n"
                head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
                await client.send(head.encode() + chunks)
                assert (await client.answer()).status == 200
            assert [each.status for each in got] == [200] * 9
            assert len(read) == 10
            assert read[-1][2] == read[6][2] == body
            assert ("GET", "/props", b"") in read


def has_ipv6() -> bool:
    """Whether this machine has ::1."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_localhost_is_wherever_the_server_listens(tmp_path: Path, host: str) -> None:
    """`localhost` may be two addresses, of which one refuses."""
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    listener = await asyncio.start_server(_hello, host, 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        static = [{"name": "near", "url": f"http://localhost:{port}"}]
        if host == "::1" and not _localhost_has_ipv6(port):
            pytest.skip("localhost has no IPv6 address here")
        async with scripted(tmp_path, upstreams=static) as router:
            assert (await router.chat("near")).status == 200


def _localhost_has_ipv6(port: int) -> bool:
    found = socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
    return any(entry[0] == socket.AF_INET6 for entry in found)


async def _hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(SeenRequest(head, b"").values("content-length")[0]))
    writer.write(answer(b"{}"))
    await writer.drain()
    writer.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_the_router_listens_on_ipv6(tmp_path: Path) -> None:
    async with scripted(tmp_path, scripted_pool("alpha"), listen="[::1]:0") as router:
        assert router.url.startswith("http://[::1]:")
        assert (await router.answered("alpha")).status == 200
        assert await hosts_accepted(router, "[::1]", "localhost") == [200, 200]


async def hosts_accepted(router: Served, *hosts: str) -> list[int]:
    """Ask with several Host lines; return the statuses."""
    statuses = []
    for host in hosts:
        async with RawClient(*router.address) as client:
            await client.send(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            statuses.append((await client.answer()).status)
    return statuses

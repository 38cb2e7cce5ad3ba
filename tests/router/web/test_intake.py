"""Bodies come in counted, timed, decoded and accounted for; files and shares are given back."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import brotli
import pytest

from modelpool_router.core.spec import Bounds, HoldLedger
from modelpool_router.web import coding
from modelpool_router.web.coding import BadCoding, decoder_for, zstd
from modelpool_router.web.intake import PIECE, Body, IntakeLimits
from modelpool_router.web.server import ServerOptions
from rawclient import RawAnswer, RawClient
from stubfront import KEY, Front, stub_front

P = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
    f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
).encode()
J = b'{"model":"m"}'
SMALL = IntakeLimits(max_body_bytes=64 * 1024, spool_above_bytes=16 * 1024)


def padded(size: int) -> bytes:
    """Return a good body of exactly *size* bytes."""
    return J[:-1] + b',"x":"' + b"a" * (size - len(J) - 7) + b'"}'


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare-deflate": ("deflate", raw_deflate),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstd.compress),
}


async def ask(front: Front, *pieces: bytes) -> RawAnswer:
    async with RawClient(front.host, front.port) as client:
        await client.send_pieces(pieces)
        return await client.answer()


def labelled(data: bytes, label: str) -> bytes:
    return P + f"Content-Encoding: {label}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("size", [60, 16 * 1024, 16 * 1024 + 1, 64 * 1024])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_bodies_arrive_byte_for_byte(size: int, framing: str) -> None:
    """In memory or in a file, up to the limit itself."""
    body = padded(size)
    if framing == "length":
        head = P + b"Content-Length: %d\r\n\r\n" % size
        raw = [head, body[:30], body[30:]]
    else:
        cut = [body[at : at + 5000] for at in range(0, size, 5000)]
        raw = [P + b"Transfer-Encoding: chunked\r\n\r\n"]
        raw += [b"%x\r\n%s\r\n" % (len(each), each) for each in cut] + [b"0\r\n\r\n"]
    async with stub_front(limits=SMALL) as (front, stub, _):
        answer = await ask(front, *raw)

        assert answer.status == 200
        assert stub.bodies == [body]
        assert stub.ledger.held_bytes == 0


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_over_the_limit_gets_a_413_that_can_be_read(framing: str) -> None:
    """The client writes everything before it looks; it must find the answer, not a reset."""
    body = b"a" * (8 * 1024 * 1024)
    if framing == "length":
        raw = P + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        raw = P + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with stub_front(limits=SMALL) as (front, stub, _):
        async with RawClient(front.host, front.port) as client:
            await client.send(raw)
            answer = await client.answer()

            assert (answer.status, answer.closing) == (413, True)
            assert answer.json()["error"]["code"] == "request_too_large"
            assert await client.ended() == b""
        assert stub.demands == []
        assert stub.ledger.held_bytes == 0


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("size", [60, 40_000])
async def test_compressed_bodies_are_decoded(name: str, size: int) -> None:
    """The model is read from, and the member gets, what was meant."""
    label, pack = PACKERS[name]
    packed = pack(padded(size))
    async with stub_front(limits=SMALL) as (front, stub, _):
        whole = await ask(front, labelled(packed, label))
        pieces = await ask(front, *[bytes([each]) for each in labelled(packed, label.upper())])

        assert (whole.status, pieces.status) == (200, 200)
        assert stub.bodies == [padded(size)] * 2


@pytest.mark.parametrize("name", PACKERS)
async def test_bombs_are_stopped_at_the_limit(name: str) -> None:
    """The bound counts what comes out, not what goes in."""
    label, pack = PACKERS[name]
    bomb = pack(b"\0" * 50_000_000)
    limits = IntakeLimits(max_body_bytes=1_000_000, spool_above_bytes=2_000_000)
    async with stub_front(limits=limits) as (front, stub, _):
        answer = await ask(front, labelled(bomb, label))

        assert answer.status == 413
        assert stub.ledger.held_bytes == 0


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("damage", ["plain", "cut", "behind", "twice", "empty"])
async def test_what_does_not_fit_its_label_is_refused(name: str, damage: str) -> None:
    """400, never a 500 and never half a body."""
    label, pack = PACKERS[name]
    packed = pack(padded(500))
    data = {
        "plain": padded(500),
        "cut": packed[:-3],
        "behind": packed + b"more",
        "twice": packed + packed,
        "empty": b"",
    }[damage]
    async with stub_front() as (front, stub, _):
        answer = await ask(front, labelled(data, label))

        assert answer.status == 400
        assert answer.json()["error"]["code"] == "invalid_framing"
        assert stub.demands == []


@pytest.mark.parametrize("name", PACKERS)
def test_decoders_hand_out_bounded_pieces(name: str) -> None:
    """Ten megabytes come in pieces, and end only where they end."""
    label, pack = PACKERS[name]
    decoder = decoder_for(label)
    sizes = [len(piece) for piece in decoder.feed(pack(b"a" * 10_000_000))]
    decoder.finish()

    assert sum(sizes) == 10_000_000
    assert max(sizes) <= 2 * coding.PIECE
    with pytest.raises(BadCoding):
        list(decoder.feed(b"x"))
        decoder.finish()


async def test_a_full_ledger_refuses_with_a_time_to_come_back() -> None:
    """Declared lengths are refused before anything is read, others when the room is used up."""
    async with stub_front() as (front, stub, _):
        stub.ledger.bounds = Bounds(max_held_bytes=1000)
        declared = await ask(front, P + b"Content-Length: 2000\r\n\r\n")
        counted = await ask(front, P + b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b" " * 2000)

        for answer in (declared, counted):
            assert answer.status == 503
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.json()["error"]["type"] == "server_error"
            assert 1 <= int(answer.header("retry-after") or "") <= 60
            assert answer.header("retry-after-ms")
        assert stub.ledger.held_bytes == 0
        assert (await ask(front, P + b"Content-Length: 13\r\n\r\n" + J)).status == 200


async def test_a_held_body_counts_until_it_is_closed() -> None:
    """Memory and file alike."""
    async with stub_front(limits=SMALL) as (front, stub, _):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            body = padded(50_000)
            await client.send(P + b"Content-Length: 50000\r\n\r\n" + body)
            await stub.arrived.wait()
            assert stub.ledger.held_bytes == 50_000
            stub.hold.set()
            assert (await client.answer()).status == 200
        assert stub.ledger.held_bytes == 0


async def test_a_client_that_leaves_inside_its_body_leaves_nothing() -> None:
    """No share, no file, no demand."""
    async with stub_front(limits=SMALL) as (front, stub, server):
        assert (
            await ask(front, P + b"Content-Length: 60000\r\n\r\n" + padded(60_000))
        ).status == 200
        await until(lambda: not server.connections)
        stub.demands.clear()
        before = open_files()
        for leave in (RawClient.close, RawClient.reset):
            async with RawClient(front.host, front.port) as client:
                await client.send(P + b"Content-Length: 60000\r\n\r\n" + b" " * 50_000)
                await until(lambda: stub.ledger.held_bytes > 0)
                leave(client)
                await until(lambda: not server.connections and not stub.ledger.held_bytes)
        assert stub.demands == []
        gc.collect()
        await until(lambda: open_files() <= before)


async def test_spool_files_have_no_name(tmp_path: Path) -> None:
    """Whatever happens to the router, nobody finds a prompt on the disk."""
    limits = IntakeLimits(spool_above_bytes=100, spool_dir=str(tmp_path))
    async with stub_front(limits=limits) as (front, stub, _):
        stub.hold = asyncio.Event()
        async with RawClient(front.host, front.port) as client:
            await client.send(P + b"Content-Length: 5000\r\n\r\n" + padded(5000))
            await stub.arrived.wait()
            assert list(tmp_path.iterdir()) == []
            stub.hold.set()
            assert (await client.answer()).status == 200
    assert stub.bodies == [padded(5000)]


@pytest.mark.parametrize(("size", "calls"), [(100, 0), (5000, 2)])
async def test_who_gives_memory_back_hears_of_bodies_in_files(
    size: int, calls: int, tmp_path: Path
) -> None:
    """Once when such a body is complete, and once when it was sent."""
    heard: list[int] = []
    limits = IntakeLimits(
        spool_above_bytes=100,
        spool_dir=str(tmp_path),
        on_spooled=lambda: heard.append(stub.ledger.held_bytes),
    )
    async with stub_front(limits=limits) as (front, stub, _):
        request = P + f"Content-Length: {size}\r\n\r\n".encode() + padded(size)
        assert (await ask(front, request)).status == 200

    assert len(heard) == calls and heard == [size, size][:calls]


async def test_a_spool_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    """503 and come back later, not a 500."""
    limits = IntakeLimits(spool_above_bytes=100, spool_dir=str(tmp_path / "missing"))
    async with stub_front(limits=limits) as (front, stub, _):
        answer = await ask(front, P + b"Content-Length: 5000\r\n\r\n" + padded(5000))

        assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_full")
        assert stub.ledger.held_bytes == 0


def test_a_body_is_closed_once() -> None:
    """The share goes back one time, however often it is closed."""
    ledger = HoldLedger(Bounds(), held_bytes=0)
    assert ledger.reserve_bytes(300)
    body = Body(ledger, 200, data=b"a" * 200)
    with body:
        body.close()
    body.close()

    assert ledger.held_bytes == 100


@pytest.mark.parametrize("spooled", [False, True])
async def test_chunks_are_bounded_and_can_be_sent_again(spooled: bool, tmp_path: Path) -> None:
    """A retry on a fresh connection starts from the beginning; a replaced model is in both."""
    data = os.urandom(PIECE * 2 + 17)
    ledger = HoldLedger(Bounds())
    ledger.reserve_bytes(len(data))
    file = None
    if spooled:
        (tmp_path / "body").write_bytes(data)
        file = (tmp_path / "body").open("rb", buffering=0)
    with Body(ledger, len(data), data=b"" if spooled else data, file=file) as body:
        view = bytes(body.view())
        seen, put_away = list(body.chunks()), []
        for piece in body.chunks():  # what is not looked at any more is read again
            put_away.append(piece)
            body.put_away()
        plain = [seen, put_away, list(body.chunks())]
        body.replace((10, 20), b"longer than ten bytes")
        replaced = b"".join(body.chunks())
        size = body.size

    assert view == data
    for pieces in plain:
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= PIECE
    assert replaced == data[:10] + b"longer than ten bytes" + data[20:]
    assert size == len(replaced)
    assert ledger.held_bytes == 0


async def test_many_chunks_of_one_byte_are_no_burden() -> None:
    """A body of 20,000 one-byte chunks is read like any other."""
    body = padded(20_000)
    raw = P + b"Transfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
    async with stub_front(options=ServerOptions()) as (front, stub, _):
        assert (await ask(front, raw)).status == 200
        assert stub.bodies == [body]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until *condition* holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

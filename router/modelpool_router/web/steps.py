"""How a handler is run for a connection of `front`: step by step without a task, or in one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .plain import PlainRequest

if TYPE_CHECKING:
    from .front import OwnConnection


class Steps:
    """
    Runs one handler without a task: on the spot, then whenever what it waits for is done.

    Enough for handlers that await futures and tasks; what asks for the current task
    (`asyncio.timeout`) has to be in a task of its own.
    """

    __slots__ = (
        "_cancelled",
        "_connection",
        "_coroutine",
        "_ended",
        "_loop",
        "_request",
        "_waits_for",
    )

    def __init__(
        self, connection: OwnConnection, request: PlainRequest, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._connection = connection
        self._request = request
        self._loop = loop
        self._coroutine: Coroutine[Any, Any, web.StreamResponse] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        self._cancelled = False
        self._ended: asyncio.Future[None] | None = None

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the handler is."""
        if self._ended is None:
            self._ended = self._loop.create_future()
            if self._coroutine is None:
                self._ended.set_result(None)
        return self._ended

    def run(self, coroutine: Coroutine[Any, Any, web.StreamResponse]) -> None:
        """Go as far as possible now."""
        self._coroutine = coroutine
        self._step()

    def cancel(self) -> None:
        """Let the handler see `CancelledError` where it waits, or when it goes on."""
        if self._waits_for is None or not self._waits_for.cancel():
            self._cancelled = True

    def _step(self, _: asyncio.Future[Any] | None = None) -> None:
        coroutine = self._coroutine
        assert coroutine is not None
        self._waits_for = None
        try:
            if self._cancelled:
                self._cancelled = False
                waits_for = coroutine.throw(asyncio.CancelledError())
            else:
                waits_for = coroutine.send(None)
        except StopIteration as done:
            self._end()
            self._connection.answered(self._request, done.value)
        except (asyncio.CancelledError, ConnectionError):
            self._end()
            self._connection.lost()
        else:
            if waits_for is None:  # it lets others run
                self._loop.call_soon(self._step)
                return
            waits_for._asyncio_future_blocking = False
            waits_for.add_done_callback(self._step)
            self._waits_for = waits_for
            if self._cancelled and waits_for.cancel():
                self._cancelled = False

    def _end(self) -> None:
        self._coroutine = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class InTask:
    """Runs one handler as a task: it has to wait for the rest of its body, with time limits."""

    __slots__ = ("_connection", "_request", "ended")

    def __init__(
        self,
        connection: OwnConnection,
        request: PlainRequest,
        coroutine: Coroutine[Any, Any, web.StreamResponse],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._connection = connection
        self._request = request
        self.ended = loop.create_task(self._run(coroutine))

    def cancel(self) -> None:
        """Let the handler see `CancelledError`."""
        self.ended.cancel()

    async def _run(self, coroutine: Coroutine[Any, Any, web.StreamResponse]) -> None:
        try:
            response = await coroutine
        except (asyncio.CancelledError, ConnectionError):
            self._connection.lost()
        else:
            self._connection.answered(self._request, response)

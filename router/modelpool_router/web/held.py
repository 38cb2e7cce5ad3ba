"""Signs of life on an event stream that is opened while its request is still held (H15)."""

from __future__ import annotations

import asyncio
from typing import Literal

from aiohttp import web

from ..core.headers import ExchangeIds, Framing, stream_head
from .faults import Family, error_frame, keepalive_frame
from .request import ClientSide
from .sink import ClientSink, PipedResponse
from .sweep import Sweep


class HeldStream:
    """
    Opens the answer of a held, streamed request when the hold gets long, and keeps it alive.

    Made by the handler when it begins to hold; `forward` continues on it. Whoever refuses the
    request in the end looks at `started`: `fail` if so, an ordinary answer after `close` if not.

    Args:
        member: For the ``x-modelpool-member`` line.
        model: The name that the client used.
        after_s: Opens the stream after this long.
        every_s: From one sign of life to the next.
        close: Announce that the connection ends with this answer.
    """

    def __init__(
        self,
        request: ClientSide,
        sweep: Sweep,
        *,
        family: Family,
        mode: Literal["comment", "chunk"],
        ids: ExchangeIds,
        member: str,
        model: str,
        after_s: float,
        every_s: float,
        close: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.sink = ClientSink(request, loop)
        self._sweep = sweep
        self._family: Family = family
        self._mode: Literal["comment", "chunk"] = mode
        self._ids = ids
        self._member = member
        self._model = model
        self._every_s = every_s
        self._close = close or not self.sink.keeps_alive
        self._due = loop.time() + after_s
        sweep.add(self)

    @property
    def started(self) -> bool:
        """Whether the client has been told 200: nothing but events can reach it now."""
        return self.sink.started

    @property
    def keep_alive(self) -> bool:
        """Whether the client was told that the connection outlives this answer."""
        return not self._close

    def check(self, now: float) -> None:
        """Send what is due."""
        if now < self._due:
            return
        self._due = now + self._every_s
        if self.sink.congested:
            return
        if not self.started:
            framing = self.sink.framing_for(Framing.CHUNKED)
            head = stream_head(
                framing,
                ids=self._ids,
                member=self._member,
                close=self._close,
            )
            self.sink.begin(head, framing, event_stream=True)
        frame = keepalive_frame(
            self._family, self._mode, request_id=self._ids.request_id, model=self._model
        )
        self.sink.write_body((frame,), None, last=False)

    def pause(self) -> None:
        """Send no signs of life for now."""
        self._sweep.discard(self)

    def resume(self) -> None:
        """End of `pause`: the request is held again."""
        self._sweep.add(self)

    def close(self) -> None:
        """Send no more signs of life. Idempotent; call it however the request ends."""
        self._sweep.discard(self)

    def fail(
        self, *, status: int, code: str, message: str, write_stall_s: float
    ) -> web.StreamResponse:
        """End a started stream with an error in it; return what the handler returns."""
        self.close()
        frame = error_frame(
            self._family,
            status=status,
            code=code,
            message=message,
            request_id=self._ids.request_id,
        )
        self.sink.end_with(frame)
        self.sink.release(self._sweep, write_stall_s)
        return PipedResponse(status=200, keep_alive=self.keep_alive)

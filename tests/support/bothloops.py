"""Run a test on asyncio's own loop and on uvloop: their transports differ where it matters."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make of an async test one that runs once per loop, in a loop of its own."""

    @functools.wraps(test)
    def run(loop_kind: str, **arguments: Any) -> None:
        complaints: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=_FACTORIES[loop_kind]) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: complaints.append(context))
            runner.run(test(**arguments))
        assert not complaints, "what the loop would have logged"

    signature = inspect.signature(test)
    kind = inspect.Parameter("loop_kind", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), kind]
    )
    del run.__wrapped__
    marked: Callable[..., None] = pytest.mark.parametrize("loop_kind", list(_FACTORIES))(run)
    return marked

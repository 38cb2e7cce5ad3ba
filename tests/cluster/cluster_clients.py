"""Clients in threads of their own, while the test does something else."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable

from cluster_router import Answer


class Client:
    """
    Asks once, or again and again until `end`.

    Args of the constructor:
        ask: Sends one request.
        again: Whether to repeat it.

    Attributes:
        answers: What came back.
        broken: What went wrong with requests that were not answered, or not to their end.
    """

    def __init__(self, ask: Callable[[], Answer], *, again: bool = False) -> None:
        self.answers: list[Answer] = []
        self.broken: list[str] = []
        self._ask = ask
        self._is_over = threading.Event()
        self._again = again
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.answers.append(self._ask())
            except (OSError, http.client.HTTPException) as error:
                self.broken.append(repr(error))
            if not self._again:
                return
            self._is_over.wait(0.05)

    @property
    def is_done(self) -> bool:
        """Whether nothing is on its way any more."""
        return not self._thread.is_alive()

    def end(self, timeout_s: float = 90) -> list[Answer]:
        """Let it finish what it does, and return its answers."""
        self._is_over.set()
        self._thread.join(timeout_s)
        assert self.is_done, "a request hangs"
        return self.answers

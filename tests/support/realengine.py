"""A real llama-server as a member."""

from __future__ import annotations

from dataclasses import dataclass

from served import Json

_FLAGS = (
    # one thread: two would wait for each other wherever another program uses the machine too
    *("--offline", "--no-webui", "--threads", "1", "--threads-batch", "1"),
    *("--ctx-size", "2048", "--parallel", "2", "--sse-ping-interval", "5"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Where the program and the model are."""

    binary: str
    model: str

    def member(self, name: str, *, model: str = "") -> Json:
        """Return the configuration of a member that runs it."""
        command = [self.binary, "--model", model or self.model, "--port", "{port}", *_FLAGS]
        expected = {"expectedLoad": "5s"}
        return {"name": name, "profile": "llama-server", "command": command, **expected}

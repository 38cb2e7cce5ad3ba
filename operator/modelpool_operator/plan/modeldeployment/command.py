"""
The command line of a managed role, and what of it nobody else may write.

The operator writes the served name, the model where nobody named one, and where to listen; all
else is `extraArgs`. A role with a `command` of its own is left alone altogether.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool_api.v1alpha1.modeldeployment import EngineName, ModelDeploymentSpec, Role

DEFAULT_PORT = 8000
HOST_FLAG = "--host"
PORT_FLAG = "--port"


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """How one engine is started."""

    command: tuple[str, ...]
    served_name: str
    """Flag of the name that clients use; ours alone."""
    aliases: tuple[str, ...]
    """Other spellings of it."""
    model: str
    """Flag of what to load; filled with the served name unless somebody names another."""
    model_aliases: tuple[str, ...]
    health: str


ENGINES: dict[EngineName, EngineFlags] = {
    EngineName.VLLM: EngineFlags(
        command=("python3", "-m", "vllm.entrypoints.openai.api_server"),
        served_name="--served-model-name",
        aliases=(),
        model="--model",
        model_aliases=(),
        health="/health",
    ),
    EngineName.SGLANG: EngineFlags(
        command=("python3", "-m", "sglang.launch_server"),
        served_name="--served-model-name",
        aliases=(),
        model="--model-path",
        model_aliases=("--model",),
        health="/health",
    ),
    EngineName.LLAMA_CPP: EngineFlags(
        command=("llama-server",),
        served_name="--alias",
        aliases=("-a",),
        model="",  # a file or a repository: only the user knows which
        model_aliases=(),
        health="/health",
    ),
}
"""Custom is missing on purpose: its image's own entry point runs, with extraArgs."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the main container runs."""

    command: tuple[str, ...]
    args: tuple[str, ...]
    health: str
    """Path of the readiness probe; empty for none."""


def command_line(spec: ModelDeploymentSpec, role: Role) -> CommandLine:
    """Return what the containers of *role* run."""
    if role.command:
        return CommandLine(role.command, (), "")
    engine = ENGINES.get(spec.engine.name)
    if engine is None:
        return CommandLine((), role.extra_args, "")
    args: list[str] = [engine.served_name, spec.model.name]
    if engine.model and not _given(role.extra_args, engine.model, *engine.model_aliases):
        args += [engine.model, spec.model.name]
    args += role.extra_args
    if not _given(role.extra_args, HOST_FLAG):
        args += [HOST_FLAG, "0.0.0.0"]
    if not _given(role.extra_args, PORT_FLAG):
        args += [PORT_FLAG, str(serving_port(role))]
    return CommandLine(engine.command, tuple(args), engine.health)


def serving_port(role: Role) -> int:
    """Return the port that requests go to: the first declared, else the role's own, else 8000."""
    if role.ports:
        return role.ports[0].container_port
    own = port_flag(role.command or role.extra_args)
    return DEFAULT_PORT if own is None else own


def port_flag(words: Sequence[str]) -> int | None:
    """Return the value of ``--port`` in *words*, the last one if there are several, or None."""
    found: int | None = None
    for at, word in enumerate(words):
        name, split, text = word.partition("=")
        if name != PORT_FLAG:
            continue
        if not split:
            text = words[at + 1] if at + 1 < len(words) else ""
        if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
            found = int(text)
    return found


def owned_flag(spec: ModelDeploymentSpec, role: Role) -> str | None:
    """Return the word of *role*'s extraArgs that sets what is the operator's to set, or None."""
    engine = ENGINES.get(spec.engine.name)
    if engine is None or role.command:
        return None
    for word in role.extra_args:
        if word.partition("=")[0] in (engine.served_name, *engine.aliases):
            return word
    return None


def _given(words: Sequence[str], *flags: str) -> bool:
    return any(word.partition("=")[0] in flags for word in words)

"""``modelpool check``, ``init`` and ``config``: everything about the configuration file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import ExitCode, fail
from .starting import DEFAULT_FILE, FILE_VARIABLE

if TYPE_CHECKING:
    from ..settings import ConfigError, Settings

config_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Print the JSON Schema or the reference of the configuration.",
)

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        envvar=FILE_VARIABLE,
        metavar="FILE",
        help=f"Configuration file; {DEFAULT_FILE} here if it exists.",
        show_default=False,
    ),
]


def chosen_file(file: Path | None) -> Path:
    """Return *file*, or the file of the usual name here; end the command if there is neither."""
    if file is not None:
        return file
    if Path(DEFAULT_FILE).is_file():
        return Path(DEFAULT_FILE)
    fail(
        f"no configuration file is named, and there is no {DEFAULT_FILE} here",
        ExitCode.USAGE,
        "name one, write one with `modelpool init`, or try `modelpool demo`",
    )


def refuse_config(error: ConfigError) -> None:
    """Print every problem and end with the exit code for that."""
    typer.secho("error: " + str(error), fg=typer.colors.RED, err=True)
    raise typer.Exit(ExitCode.USAGE)


def warn(settings: Settings) -> None:
    """Print what is odd in *settings* but can be used."""
    for warning in settings.source.warnings if settings.source else ():
        typer.secho(f"warning: {warning}", fg=typer.colors.YELLOW, err=True)


def check(
    file: FileArgument = None,
    file_only: Annotated[
        bool,
        typer.Option(
            "--file-only", help="Do not look for programs, folders and secrets on this machine."
        ),
    ] = False,
) -> None:
    """
    Say everything that is wrong with a configuration file, without starting anything.

    Example:

        modelpool check pool.yaml
    """
    from ..settings import ConfigError, load, verify

    path = chosen_file(file)
    try:
        settings = load(path, os.environ)
        problems = [] if file_only else verify(settings, os.environ)
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        refuse_config(error)
        return
    warn(settings)
    members = sum(len(pool.members) for pool in settings.pools)
    counts = [
        _count(len(settings.pools), "pool"),
        _count(members, "member"),
        *([_count(len(settings.upstreams), "upstream")] if settings.upstreams else []),
    ]
    typer.echo(f"{path}: ok - {', '.join(counts)}; listens on {settings.listen}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@config_app.command()
def schema() -> None:
    """
    Print the JSON Schema of the configuration file, for editors.

    Example:

        modelpool config schema > modelpool.schema.json
    """
    from ..settings.schema import schema_text

    typer.echo(schema_text(), nl=False)


@config_app.command()
def reference() -> None:
    """Print the reference of all settings, in Markdown: type, default and reason of each."""
    from ..settings.reference import reference_text

    typer.echo(reference_text(), nl=False)


_COMMANDS = {
    "llama-server": ("{server}", "--model", "{model}", "--alias", "{name}", "--port", "{{port}}"),
    "vllm": ("vllm", "serve", "{model}", "--served-model-name", "{name}", "--port", "{{port}}"),
    "sglang": (
        *("python", "-m", "sglang.launch_server", "--model-path", "{model}"),
        *("--served-model-name", "{name}", "--port", "{{port}}"),
    ),
    "tgi": ("text-generation-launcher", "--model-id", "{model}", "--port", "{{port}}"),
    "generic": ("{model}", "--port", "{{port}}"),
}
"""How each engine is started; what is in double braces stays for the router."""

_HEAD = """\
# Configuration of modelpool: members of a pool take turns on one accelerator slot.
# All settings, their defaults and reasons: modelpool config reference
# Check: modelpool check {file}        Start: modelpool serve {file}

listen: 127.0.0.1:8080            # clients connect here; other machines cannot
admin: 127.0.0.1:9090             # modelpool status, /metrics

pools:
  - name: {pool}
    swapBudget: 300s              # longest hold of a request; Node clients are answered earlier
    # maxTurn: 60s                # how long newcomers for the resident may overtake others
    # linger: auto                # how long an idle resident is kept while others wait
    # idleUnloadAfter: off        # empty the slot when nobody asks for so long
    default: {default}
    members:
"""
_EXAMPLES = ("small=models/small.gguf", "large=models/large.gguf")


def init(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME=FILE",
            help="A member and its model file (or model id, or program for generic); repeat it.",
        ),
    ] = None,
    llama_server: Annotated[
        str, typer.Option(metavar="PROGRAM", help="The llama-server program.")
    ] = "llama-server",
    profile: Annotated[
        str, typer.Option(help=f"Engine of the members: {', '.join(_COMMANDS)}.")
    ] = "llama-server",
    pool: Annotated[str, typer.Option(help="Name of the pool.")] = "gpu0",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - = stdout.")
    ] = Path(DEFAULT_FILE),
) -> None:
    """
    Write a commented configuration file to begin with. Never overwrites one.

    Examples:

        modelpool init --model coder=models/coder.gguf --model chat=models/chat.gguf

        modelpool init --profile vllm --model coder=Qwen/Qwen2.5-Coder-7B -o pool.yaml
    """
    from ..settings import ConfigError, parse

    if profile not in _COMMANDS:
        fail(f"there is no profile {profile!r}", ExitCode.USAGE, f"use {', '.join(_COMMANDS)}")
    folder = Path.cwd() if str(output) == "-" else output.absolute().parent
    text = config_text(model or list(_EXAMPLES), llama_server, profile, pool, output, folder)
    try:
        parse(text, file=str(output), folder=folder)
    except ConfigError as error:
        refuse_config(error)
    if str(output) == "-":
        typer.echo(text, nl=False)
        return
    try:
        # Exclusive creation: a file that appeared a moment ago is safe, too.
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        fail(f"{output} exists already", ExitCode.FAILED, "remove it, or choose another with -o")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}", ExitCode.FAILED)
    typer.echo(f"wrote {output}")
    typer.echo("next:" if model else "put your own model files into it, then:")
    typer.echo(f"  modelpool check {output}\n  modelpool serve {output}")


def config_text(
    models: list[str], llama_server: str, profile: str, pool: str, output: Path, folder: Path
) -> str:
    """
    Return the file that `init` writes.

    Args:
        models: ``NAME=FILE``.
        llama_server: Program, as it was given here.
        profile: One of `_COMMANDS`.
        pool: Its name.
        output: Where it will be written, for the comments.
        folder: From where paths in the file count.
    """
    members = []
    names = []
    for entry in models:
        name, equals, model = entry.partition("=")
        if not equals or not name or not model:
            fail(f"--model {entry!r} is not NAME=FILE", ExitCode.USAGE, "as in --model a=a.gguf")
        names.append(name)
        values = {
            "name": name,
            "model": _from_folder(model, folder),
            "server": _from_folder(llama_server, folder) if "/" in llama_server else llama_server,
        }
        words = [_quoted(word.format(**values)) for word in _COMMANDS[profile]]
        members.append(
            f"      - name: {_quoted(name)}\n"
            f"        # models: [{_quoted(f'my-{name}')}]  # further names that clients may use\n"
            f"        profile: {profile}\n"
            f"        command: [{', '.join(words)}]\n"
        )
    file = output if str(output) != "-" else Path(DEFAULT_FILE)
    head = _HEAD.format(file=file, pool=_quoted(pool), default=_quoted(names[0]))
    return head + "".join(members)


def _from_folder(path: str, folder: Path) -> str:
    """Return *path*, meant from here, as it must be written in a file in *folder*."""
    here = Path.cwd()
    if folder == here or not (here / path).exists():
        return path
    return str((here / path).absolute())


def _quoted(word: str) -> str:
    """Return *word* as one YAML scalar in a flow list."""
    plain = re.fullmatch(r"[A-Za-z/._-][A-Za-z0-9/._-]*", word)
    reserved = word.lower() in ("true", "false", "null", "yes", "no", "on", "off", "-", ".")
    return word if plain and not reserved else json.dumps(word, ensure_ascii=False)

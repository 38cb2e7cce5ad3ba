"""
The reference page of the configuration, made from the settings themselves.

``python -m modelpool_router.settings.reference`` writes ``docs/configuration.md`` and the JSON
Schema beside it; a test fails when they differ from the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .environment import NOT_SETTINGS, PREFIX
from .model import Section
from .schema import SCHEMA_FILE, default_value, schema_text
from .shape import Key, Kind, keys_of, prose_of, sections, type_text

REFERENCE_FILE = "configuration.md"

_HEAD = f"""\
# Configuration

<!-- Made by `python -m modelpool_router.settings.reference`: change the settings, not the page. -->

`modelpool serve FILE` reads one YAML file. A small one:

```yaml
# yaml-language-server: $schema=./{SCHEMA_FILE}
listen: 127.0.0.1:8080
pools:
  - name: gpu0
    swapBudget: 300s
    default: coder-small
    members:
      - name: coder-small
        models: [gpt-4o-mini]            # further names that clients may use
        profile: llama-server
        command: [llama-server, --model, small.gguf, --port, "{{port}}"]
      - name: coder-large
        profile: vllm
        command: [vllm, serve, large, --port, "{{port}}"]
upstreams:                                # never swapped, routed by name
  - name: embedder
    url: http://10.0.0.7:8080
```

A pool in Kubernetes names the objects that run its members; they need nothing but a Deployment:

```yaml
leaseNamespace: lab
pools:
  - name: gpu1
    members:
      - name: coder-small
        profile: llama-server
        deployment: {{namespace: lab, name: coder-small, port: 8000}}
      - name: coder-large
        profile: vllm
        deployment: {{namespace: lab, name: coder-large, port: 8000}}
```

`modelpool init` writes one, `modelpool check FILE` says everything that is wrong with it,
`modelpool config schema` prints the JSON Schema that editors use
([{SCHEMA_FILE}]({SCHEMA_FILE})).

## How it is read

- **Strictly.** A key that is unknown, stands twice or has no value is an error, with file, line,
  column, the reason and the way out. All errors are reported at once, before anything starts.
- **Flags win over the environment, the environment over the file, the file over the defaults.**
  The variable of a key is `{PREFIX}` and the key in capitals: `{PREFIX}MAX_HELD=200`. Two
  underscores go one level down, and an item of a list is called by its name, with underscores for
  whatever is no letter or digit: `{PREFIX}POOLS__GPU0__SWAP_BUDGET=60s`,
  `{PREFIX}POOLS__GPU0__MEMBERS__CODER_SMALL__PARALLEL=4`. A list is written with commas or as JSON,
  a command as in a shell or as JSON. Empty variables count as unset. A variable that sets nothing
  gets a warning. {", ".join(f"`{PREFIX}{name}`" for name in NOT_SETTINGS)} have other purposes.
- **Durations** are written like `300s`, `4m30s`, `1h` or `500ms`: one to four numbers of up to
  five digits with `h`, `m`, `s` or `ms`. **Sizes** are `64MiB`, `2GB` or a number of bytes.
- **Names** of members, aliases and upstreams are unique over the whole file and have 1 to 200
  printable characters; slashes are fine.
- **Relative paths** count from the folder of the file, not from where the router was started.
- **Secrets** never stand in the file: `{{file: PATH}}` or `{{env: NAME}}` says where they are read.
  `{PREFIX}KEYS` and `{PREFIX}ADMIN_TOKEN` may hold the secret itself.
- **Reload.** When the file changes, and on SIGHUP, it is read again. A file with an error changes
  nothing; `listen`, `admin`, `stateDir`, `maxConnections`, `kubernetes`, `leaseNamespace`, the
  namespace of `poolsFrom` and `logFormat` need a restart. Members that are not touched go on as
  they are; a changed command counts from the next load.
"""

_TITLES = {
    "": ("Router", "The top level of the file."),
    "pools[]": ("Pool", "Each item of `pools`: one exclusive slot."),
    "pools[].members[]": ("Member", "Each item of `members` of a pool: one model service."),
    "pools[].members[].deployment": (
        "Object of Kubernetes",
        "`deployment`, `statefulSet`, `inferenceService` or `modelDeployment` of a member; one of "
        "them instead of `command`. All members of a pool are in Kubernetes, or none.",
    ),
    "pools[].memorySettle": (
        "Memory gate",
        "`memorySettle` of a pool: wait for free accelerator memory before a load.",
    ),
    "upstreams[]": ("Upstream", "Each item of `upstreams`: a service that is never swapped."),
    "poolsFrom": (
        "ModelPools",
        "`poolsFrom`: pools that are written as ModelPool objects instead of in this file.",
    ),
    "kubernetes": ("API server", "`kubernetes`: how the API server is reached."),
    "keys": ("Secret", "`keys`, `adminToken` and `apiKey` of an upstream; exactly one of the two."),
}


def reference_text() -> str:
    """Return the page, in Markdown."""
    levels = sections()
    parts = [_HEAD]
    for path, (title, sentence) in _TITLES.items():
        parts.append(f"## {title}\n\n{sentence}\n\n{_table(levels[path])}")
    return "\n".join(parts)


def _table(section: type[Section]) -> str:
    rows = ["| key | type | default | what and why |", "|---|---|---|---|"]
    prose = prose_of(section)
    for key in keys_of(section).values():
        text = prose.get(key.attribute, "").replace("|", "\\|")
        rows.append(f"| `{key.name}` | {type_text(key)} | {default_text(key)} | {text} |")
    return "\n".join(rows) + "\n"


def default_text(key: Key) -> str:
    """Return the default of *key* for people."""
    if key.info.is_required():
        return "required"
    if key.name == "stateDir":
        return "`~/.local/state/modelpool`"
    value = default_value(key)
    if value is None or key.kind in (Kind.SECTIONS, Kind.SECTION):
        return "none"
    if isinstance(value, list | dict):
        return "empty"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value}`"


def main(folder: Path) -> None:
    """Write the page and the schema into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REFERENCE_FILE).write_text(reference_text(), encoding="utf-8")
    (folder / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs"))

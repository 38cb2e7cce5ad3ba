"""
Read YAML into plain values and remember where each stood.

Strict where YAML is lax: a duplicate key, a second document, a tag or an anchor that contains
itself is a problem, and reading goes on to find the next one. Numbers remember how they were
written, so that ``command: [--temp, 0.10]`` passes on ``0.10``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .problems import Problem
from .units import WrittenFloat, WrittenInt

Path_ = tuple[str | int, ...]
"""Where a value is: keys and indices from the top."""

_NODE_LIMIT = 100_000
"""Anchors can make a short file expand without end; no real configuration comes near."""
_DEEPEST = 50
"""Levels; a real configuration has eight."""
_TAG = "tag:yaml.org,2002:"


class Place(NamedTuple):
    """Where a value was written."""

    file: str
    line: int | None = None
    column: int | None = None


@dataclass(slots=True)
class Source:
    """Where the values of a configuration came from: a file, the environment, flags."""

    file: str
    """As it was given on the command line."""
    folder: Path
    """Absolute; relative paths in the file count from here."""
    places: dict[Path_, Place] = field(default_factory=dict)
    warnings: list[Problem] = field(default_factory=list)
    """What is odd but can be used."""
    path: Path | None = None
    """Absolute path of the file, to watch it; None when there is none."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    overrides: Mapping[str, object] = field(default_factory=dict, repr=False)
    """With `file` and `environ`, what is needed to read everything once more."""

    def place(self, path: Iterable[str | int]) -> Place:
        """Return where *path* was written; if it was not, where its nearest parent was."""
        here = tuple(path)
        while here:
            if here in self.places:
                return self.places[here]
            here = here[:-1]
        return self.places.get((), Place(self.file))

    def problem(self, path: Iterable[str | int], reason: str, way_out: str) -> Problem:
        """Return the problem *reason* with the value at *path*."""
        here = tuple(path)
        return Problem(*self.place(here), show_path(here), reason, way_out)


def show_path(path: Iterable[str | int]) -> str:
    """Return *path* as people write it: ``pools[0].members[1].command``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_yaml(text: str, source: Source) -> tuple[dict[str, Any], list[Problem]]:
    """
    Return the mapping that *text* holds, and every problem of its form.

    Places go into *source*. An empty text is an empty mapping.
    """
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        return {}, [_syntax_problem(error, source)]
    except YAMLError as error:
        # The reader's own complaint about control characters; it knows no line.
        reason = str(error).splitlines()[0]
        return {}, [Problem(source.file, None, None, "", reason, "remove the character")]
    except RecursionError:
        reason = "the file is nested too deeply"
        return {}, [Problem(source.file, None, None, "", reason, "close what was opened")]
    if node is None:
        return {}, []
    reader = _Reader(source)
    tree = reader.value(node, ())
    if not isinstance(tree, dict):
        reader.report(node, (), "the file is not a mapping", "write it as lines of `key: value`")
        return {}, reader.problems
    return tree, reader.problems


def _syntax_problem(error: MarkedYAMLError, source: Source) -> Problem:
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    column = None if mark is None else mark.column + 1
    reason = error.problem or error.context or "this is not YAML"
    way_out = "correct the YAML here or just before"
    if "another document" in reason:
        reason, way_out = "a second document begins here", "keep one document in the file"
    elif "\\t" in reason:
        way_out = "indent with spaces instead of tabs"
    return Problem(source.file, line, column, "", reason, way_out)


class _Reader:
    """Turns nodes into values, one file."""

    def __init__(self, source: Source) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._open: set[int] = set()
        self._count = 0

    def report(self, node: Node, path: Path_, reason: str, way_out: str) -> None:
        place = self._place(node)
        self.problems.append(Problem(*place, show_path(path), reason, way_out))

    def _place(self, node: Node) -> Place:
        mark = node.start_mark
        return Place(self._source.file, mark.line + 1, mark.column + 1)

    def value(self, node: Node, path: Path_) -> Any:
        self._count += 1
        if path not in self._source.places:
            self._source.places[path] = self._place(node)
        if id(node) in self._open:
            self.report(node, path, "an anchor contains itself", "write the value out")
            return None
        if self._count > _NODE_LIMIT:
            if self._count == _NODE_LIMIT + 1:
                self.report(node, path, "the file has too many values", "use fewer anchors")
            return None
        if len(self._open) >= _DEEPEST:
            self.report(node, path[:2], "the file is nested too deeply", "close what was opened")
            return None
        self._open.add(id(node))
        try:
            return self._value(node, path)
        finally:
            self._open.discard(id(node))

    def _value(self, node: Node, path: Path_) -> Any:
        if not isinstance(node, ScalarNode) and node.tag not in (_TAG + "map", _TAG + "seq"):
            self.report(node, path, f"the tag {node.tag} is not known", "remove the tag")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path_) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged = self._merged(value_node, path) | merged
                continue
            if not isinstance(key_node, ScalarNode):
                self.report(key_node, path, "a key is not plain text", "write `key: value`")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in own:
                self.report(
                    key_node,
                    here,
                    f"the key stands twice, first on line {lines[key]}",
                    "keep one of the two",
                )
                continue
            lines[key] = key_node.start_mark.line + 1
            # A key's own place, not its value's: that is where the eye looks for it.
            self._source.places[here] = self._place(key_node)
            own[key] = self.value(value_node, here)
        return merged | own

    def _merged(self, node: Node, path: Path_) -> dict[str, Any]:
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        result: dict[str, Any] = {}
        for each in nodes:
            if isinstance(each, MappingNode):
                result = self.value(each, path) | result
            else:
                self.report(each, path, "<< needs a mapping", "point it at an anchored mapping")
        return result

    def _scalar(self, node: ScalarNode, path: Path_) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        text = str(node.value)
        match kind:
            case "str" | "timestamp":
                return text
            case "null":
                return None
            case "bool":
                return text.casefold() == "true"
            case "int":
                return _integer(text)
            case "float":
                return _float(text)
            case _:
                self.report(node, path, f"the tag {node.tag} is not known", "remove the tag")
                return text


def _integer(text: str) -> WrittenInt | str:
    digits = text.replace("_", "")
    prefix = digits.lower().lstrip("+-")[:2]
    base = {"0x": 16, "0o": 8, "0b": 2}.get(prefix, 10)
    try:
        number = WrittenInt(int(digits, base))
    except ValueError:
        return text
    number.text = text
    return number


def _float(text: str) -> WrittenFloat | str:
    spelled = text.replace("_", "").casefold().replace(".inf", "inf").replace(".nan", "nan")
    try:
        number = WrittenFloat(spelled)
    except ValueError:
        return text
    number.text = text
    return number


def plain_copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of mappings and lists; values themselves are shared."""

    def copied(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: copied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [copied(item) for item in value]
        return value

    return {key: copied(value) for key, value in tree.items()}

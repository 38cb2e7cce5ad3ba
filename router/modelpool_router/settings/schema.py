"""
The JSON Schema of the configuration file, for editors.

It is looser than the reader where JSON Schema cannot say it (ranges of durations, names that
must be unique); the reader has the last word.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from .model import Section, Settings
from .shape import Key, Kind, keys_of, prose_of, sections
from .units import Duration, Size

SCHEMA_FILE = "modelpool.schema.json"
"""Published under docs/."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Generator(GenerateJsonSchema):
    """pydantic's, without the machine's own home folder as a default and without titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file."""
    raw = Settings.model_json_schema(by_alias=True, schema_generator=_Generator, mode="validation")
    for name, section in _by_class_name().items():
        target = raw if name == "Settings" else raw["$defs"].get(name)
        if target is not None:
            _set_prose(target, section)
    tidy = _tidy(raw)
    assert isinstance(tidy, dict)
    for name, section in _by_class_name().items():
        target = tidy if name == "Settings" else tidy["$defs"].get(name)
        if target is None:
            continue
        for key in keys_of(section).values():
            _set_default(target["properties"][key.name], key)
    title = "modelpool configuration"
    return {"$schema": _DIALECT, "title": title, **tidy}


def schema_text() -> str:
    """Return the published file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _by_class_name() -> dict[str, type[Section]]:
    return {section.__name__: section for section in sections().values()}


def _tidy(node: Any) -> Any:
    """Drop titles of classes and the null alternative: a key without a value is an error."""
    if isinstance(node, list):
        return [_tidy(each) for each in node]
    if not isinstance(node, dict):
        return node
    tidy = {
        key: _tidy(value)
        for key, value in node.items()
        if key not in ("title", "default") or isinstance(value, dict)
    }
    options = tidy.get("anyOf")
    if isinstance(options, list):
        options = [each for each in options if each != {"type": "null"}]
        if len(options) == 1:
            del tidy["anyOf"]
            tidy = {**options[0], **tidy}
        else:
            tidy["anyOf"] = options
    if isinstance(tidy.get("description"), str):
        tidy["description"] = " ".join(tidy["description"].split())
    return tidy


def _set_prose(target: dict[str, Any], section: type[Section]) -> None:
    prose = prose_of(section)
    for key in keys_of(section).values():
        if key.attribute in prose:
            # In place of what its class says, if it is a section; keys in order, as pydantic's.
            value = target["properties"][key.name]
            value["description"] = prose[key.attribute]
            target["properties"][key.name] = dict(sorted(value.items()))


def _set_default(target: dict[str, Any], key: Key) -> None:
    value = default_value(key)
    if value is not None:
        target["default"] = value


def default_value(key: Key) -> Any:
    """Return the default of *key* as the file would have it; None where there is none."""
    if key.info.is_required() or key.name == "stateDir":
        return None  # the folder depends on the user
    value = key.info.get_default(call_default_factory=True)
    for mark in key.info.metadata:
        if isinstance(mark, Duration):
            return mark.write(value)
        if isinstance(mark, Size):
            return mark.write(value)
    if value is None or key.kind in (Kind.SECRET, Kind.SECTION):
        return None
    if isinstance(value, bool | int):
        return value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return list(value)
    return value if isinstance(value, dict) else str(value)

"""Reference page and JSON Schema are those of the code, and nothing is left unexplained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelpool_router.settings import parse
from modelpool_router.settings.reference import REFERENCE_FILE, default_text, reference_text
from modelpool_router.settings.schema import SCHEMA_FILE, json_schema, schema_text
from modelpool_router.settings.shape import Key, keys_of, prose_of, sections, type_text

DOCS = Path(__file__).parents[2] / "docs"
KEYS = [
    pytest.param(key, prose_of(section), id=f"{path}.{key.name}")
    for path, section in sections().items()
    for key in keys_of(section).values()
]


@pytest.mark.parametrize(
    ("file", "text"), [(REFERENCE_FILE, reference_text), (SCHEMA_FILE, schema_text)]
)
def test_published_file_is_made_from_this_code(file: str, text: Any) -> None:
    assert (DOCS / file).read_text(encoding="utf-8") == text(), (
        "out of date: run python -m modelpool_router.settings.reference"
    )


@pytest.mark.parametrize(("key", "prose"), KEYS)
def test_every_key_is_explained(key: Key, prose: dict[str, str]) -> None:
    assert re.fullmatch(r"[A-Z`].{15,}\.", prose[key.attribute])
    assert type_text(key)
    assert default_text(key)
    assert f"| `{key.name}` |" in reference_text()


def test_example_of_the_page_is_accepted() -> None:
    example = re.search(r"```yaml\n(.*?)```", reference_text(), re.DOTALL)

    assert example is not None
    assert parse(example[1]).pools[0].swap_budget_s == 300.0


def test_schema_says_defaults_and_forms_as_the_file_has_them() -> None:
    schema = json_schema()
    pool = schema["$defs"]["Pool"]["properties"]

    assert schema["additionalProperties"] is False
    assert schema["properties"]["listen"]["default"] == "127.0.0.1:8080"
    assert schema["properties"]["maxBodyBytes"]["default"] == "64MiB"
    assert schema["properties"]["corsOrigins"]["default"] == []
    assert "default" not in schema["properties"]["stateDir"]
    assert pool["swapBudget"]["default"] == "300s"
    assert pool["swapBudget"]["type"] == "string"
    assert re.match(pool["swapBudget"]["pattern"], "4m30s")
    assert not re.match(pool["swapBudget"]["pattern"], "1d")
    assert {"const": "off", "type": "string"} in pool["drainTimeout"]["anyOf"]
    assert pool["drainTimeout"]["default"] == "off"
    assert schema["$defs"]["Member"]["required"] == ["name"]


def test_schema_knows_no_null_and_no_machine() -> None:
    text = schema_text()

    assert '"null"' not in text
    assert str(Path.home()) not in text
    assert json.loads(text)["$schema"] == "https://json-schema.org/draft/2020-12/schema"

"""Documents that can be compared with the code are; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelpool_router.core.paths import find_path
from modelpool_router.web.errors import STATUS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = _LINK.findall(page.read_text("utf-8"))

    missing = [target for target in targets if not (page.parent / target).exists()]

    assert missing == []


def test_the_page_of_errors_names_every_code_of_ours() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    told_by_status = {405, 408, 413, 414, 415, 417, 421, 426, 431, 500, 501, 505}

    missing = [
        code
        for code, status in STATUS.items()
        if status not in told_by_status and f"`{code}`" not in text
    ]

    assert missing == []


def test_the_page_of_errors_names_only_paths_that_exist() -> None:
    text = (ROOT / "docs" / "errors.md").read_text("utf-8").split("## Paths")[1]
    paths = re.findall(r"`(?:GET |POST )?(/[a-z0-9_/*{}]+)`", text)

    unknown = [
        path
        for path in paths
        if find_path(re.sub(r"\{[a-z]+\}", "x", path).replace("*", "speech")) is None
    ]

    assert len(paths) > 15
    assert unknown == []


def test_the_readme_shows_the_two_commands_of_a_newcomer() -> None:
    text = (ROOT / "README.md").read_text("utf-8")

    assert "\nmake run " in text
    assert "\nmake test " in text

"""Documents that can be compared with the code are; links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import memroles
from crdcheck import Admission
from modelpool_router.cli.main import app
from modelpool_router.core.paths import find_path
from modelpool_router.web.errors import STATUS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
_ANCHOR = re.compile(r"\]\((?!https?://)([^)#]*)#([^)]+)\)")
RUNBOOK = "https://github.com/modelpool/modelpool/blob/main/docs/runbook.md#"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = _LINK.findall(page.read_text("utf-8"))

    missing = [target for target in targets if not (page.parent / target).exists()]

    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return what a link may name after the # on *page*."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^a-z0-9 _-]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_a_page_leads_to_a_heading(page: Path) -> None:
    missing = [
        f"{target}#{anchor}"
        for target, anchor in _ANCHOR.findall(page.read_text("utf-8"))
        if anchor not in anchors(page.parent / target if target else page)
    ]

    assert missing == []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the verbs of `modelpool` that a page shows, each with its options."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in (*lines, *spans):
        called = re.match(r"(?:\$ |\S*/)?modelpool ([a-z]+)([^#|>]*)", line.strip())
        if called is not None:
            yield called[1], re.findall(r"(?<= )(--?[a-z][a-z-]*)", called[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_exists(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    unknown = []
    for verb, options in commands(page.read_text("utf-8")):
        command = group.commands.get(verb)
        known = set() if command is None else {o for p in command.params for o in p.opts}
        unknown += [f"{verb} {option}" for option in options if option not in known]
        if command is None:
            unknown.append(verb)

    assert unknown == []


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    found = yaml.safe_load((ROOT / "manifests" / "monitoring" / "rules.yaml").read_text("utf-8"))
    alerts = {
        rule["alert"]: rule["annotations"]["runbook_url"]
        for group in found["spec"]["groups"]
        for rule in group["rules"]
    }
    runbook = ROOT / "docs" / "runbook.md"
    entries = runbook.read_text("utf-8").split("\n## Alerts\n")[1]

    assert set(re.findall(r"^### (\w+)$", entries, re.M)) == set(alerts)
    for url in alerts.values():
        assert url.startswith(RUNBOOK)
        assert url.removeprefix(RUNBOOK) in anchors(runbook)


def test_the_overlay_of_the_installation_fits_the_base() -> None:
    text = (ROOT / "docs" / "install-kubernetes.md").read_text("utf-8")
    shown = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    overlay = next(yaml.safe_load(each) for each in shown if "kind: Kustomization" in each)
    (patch,) = yaml.safe_load(overlay["patches"][0]["patch"])
    path = ROOT / "manifests" / "operator" / "deployment.yaml"
    operator = yaml.safe_load(path.read_text("utf-8"))
    container = operator["spec"]["template"]["spec"]["containers"][0]

    assert overlay["patches"][0]["target"]["name"] == operator["metadata"]["name"]
    assert overlay["images"][0]["name"] == container["image"].partition(":")[0]
    assert patch["path"] == "/spec/template/spec/containers/0/args/0"
    flag = f"--router-image={container['image']}"
    assert container["args"][0] == flag
    assert patch["value"].partition("=")[0] == flag.partition("=")[0]


def test_the_page_of_the_installation_names_every_right() -> None:
    text = (ROOT / "docs" / "install-kubernetes.md").read_text("utf-8")
    of_operator, _, of_router = text.partition("Each router, Role named like")
    refs = ("deploymentRef", "statefulSetRef", "inferenceServiceRef", "modelDeploymentRef")
    router = memroles.of_router("lab", "gpu0", [{ref: {"name": ref.lower()}} for ref in refs])

    for granted, told in ((memroles.of_operator(), of_operator), (router, of_router)):
        rights = {resource.partition("/")[0] for _, resource in granted.pairs()}
        rows = re.findall(r"^\| (.+?) \|", told.split("| resources |")[1], re.M)
        named = {word for row in rows for word in re.findall("`([a-z]+)`", row)}
        assert named == rights


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_object_on_a_page_would_be_taken(page: Path) -> None:
    crds = [
        yaml.safe_load(path.read_text("utf-8"))
        for path in (ROOT / "manifests" / "crds").glob("modelpool.dev_*.yaml")
    ]
    by_kind = {each["spec"]["names"]["kind"]: Admission(each) for each in crds}
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        for obj in yaml.safe_load_all(block):
            if isinstance(obj, dict) and str(obj.get("apiVersion")).startswith("modelpool.dev/"):
                _, wrong = by_kind[obj["kind"]].admit(obj)
                assert wrong == []


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

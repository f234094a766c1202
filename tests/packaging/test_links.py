"""Pages link to pages and headings that exist, and name files and folders that do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.documentation import ROOT, page

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
# Records of their time may name files that have gone since.
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "performance_log.md", *(ROOT / "docs" / "decisions").glob("*.md")}
MADE_BY_USERS = {"k8s/components/secret/secret.env"}
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


def anchors(path: Path) -> set[str]:
    """Return the fragments of the headings of a Markdown page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        name, _, fragment = target.partition("#")
        if not re.match(r"[a-z]+:", target):
            linked = path.parent / name if name else path
            assert linked.exists(), target
            assert not fragment or fragment in anchors(linked), target


def test_files_that_pages_name_exist() -> None:
    found = 0
    for path in set(PAGES) - HISTORY:
        for span in page(path).spans:
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.split("/")[0] in FOLDERS - {"shared"}:
                assert span in MADE_BY_USERS or (ROOT / span).exists(), f"{path.name}: {span}"
                found += 1
    assert found > 200


def test_decisions_that_are_cited_exist() -> None:
    pages = {"index.md", *(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))}  # index: of the site
    numbers = {name[:4] for name in pages if name[:4].isdecimal()}
    cited = 0
    for path in [*PAGES, *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]:
        text = path.read_text()
        named = re.findall(r"\bdecisions/([a-z-]+\.md)", text)
        assert set(named) <= pages, path
        assert set(re.findall(r"\bdecisions?[ /](\d{4})\b", text)) <= numbers, path
        cited += len(named)
    assert cited > 40

"""The site of the documentation (mkdocs.yml) has every page, and its sources exist. mkdocs is not needed.

`make docs` builds it, and checks its links.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.packaging.documentation import ROOT

DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Knows functions by their names only."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, name, _node: name)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """docs/site_pages.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(nav: Any) -> Iterator[str]:
    """Return the pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    for child in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(child)


def test_every_page_is_in_the_navigation_and_every_entry_exists(pages: ModuleType) -> None:
    written = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *DOCS.rglob("*.md")]
    named = list(entries(SITE["nav"]))
    assert len(named) == len(set(named))
    assert set(named) == {*map(pages.site_path, written), "decisions/index.md"}


def test_links_lead_to_the_same_files_on_the_site(pages: ModuleType) -> None:
    text, targets = pages.for_site(ROOT / "README.md")
    assert "[CONTRIBUTING.md](repository/CONTRIBUTING.md), [docs/extending.md](extending.md)" in text
    assert "[docs/decisions/](decisions/index.md)" in text
    assert ROOT / "CONTRIBUTING.md" in targets
    text, targets = pages.for_site(DOCS / "install.md")
    assert "[README](index.md)" in text
    assert ROOT / "examples" / "README.md" in targets
    text, _ = pages.for_site(ROOT / "CONTRIBUTING.md")
    assert "(../performance_log.md)" in text


def test_the_list_of_decisions_has_all(pages: ModuleType) -> None:
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", pages.list_of_decisions(), re.M)
    assert {name for _, name in listed} == {path.name for path in (DOCS / "decisions").glob("*.md")}
    assert all((DOCS / "decisions" / name).read_text().startswith(f"# {title}\n") for title, name in listed)


def test_what_the_api_reference_names_is_there_and_documented() -> None:
    names = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.M)
    assert len(names) > 15
    for name in names:
        path, member = ROOT / f"{name.replace('.', '/')}.py", ""
        if not path.exists():
            module, _, member = name.rpartition(".")
            path = ROOT / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        found = [node for node in tree.body if getattr(node, "name", None) == member] if member else [tree]
        assert found, name
        assert ast.get_docstring(found[0]), name  # type: ignore[arg-type]


def test_the_python_api_is_all_in_the_reference() -> None:
    import mini_infer

    shown = (DOCS / "reference.md").read_text()
    for name in set(mini_infer.__all__) - {"__version__", "grammar"}:
        assert re.search(rf"^::: \S+\.{name}$", shown, re.M), name


def test_what_builds_it_is_pinned() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(extra) <= pinned
    assert all((ROOT / hook).exists() for hook in SITE["hooks"])
    assert Path(SITE["docs_dir"]) == Path("docs")

"""Pages of the site that do not lie in docs/: a hook of mkdocs, which `make docs` runs.

The README becomes the first page, docs/decisions gets a list of its pages, and what pages link to outside docs/ is
copied to `repository/`, so that each link leads on the site where it leads in a checkout. Changes no file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def site_path(path: Path) -> str:
    """Where a file or folder of the repository is on the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_dir():
        path /= "index.md" if path.is_relative_to(DOCS) else "README.md"
    return str(path.relative_to(DOCS)) if path.is_relative_to(DOCS) else f"repository/{path.relative_to(ROOT)}"


def for_site(page: Path) -> tuple[str, set[Path]]:
    """The text of a page with links that lead somewhere on the site, and what they lead to in the repository."""
    targets = set()
    here = os.path.dirname(site_path(page)) or "."

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[0]).resolve()
        if not target.exists():
            return match[0]  # mkdocs says so
        targets.add(target / "README.md" if target.is_dir() and not target.is_relative_to(DOCS) else target)
        return os.path.relpath(site_path(target), here)

    return LINK.sub(link, page.read_text()), targets


def list_of_decisions() -> str:
    """A page with the titles of docs/decisions."""
    pages = sorted((DOCS / "decisions").glob("*.md"))
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in pages]
    lines = [f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True)]
    return "# Decisions\n\nWhy things are as they are, by subject.\n\n" + "\n".join(lines) + "\n"


# -- called by mkdocs -----------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, and every page and file that one of them links to."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "decisions/index.md", content=list_of_decisions()))
    waiting, seen = [ROOT / "README.md", *DOCS.rglob("*.md")], set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.is_dir():
            continue
        seen.add(path)
        is_page = path.suffix == ".md"
        text, targets = for_site(path) if is_page else ("", set())
        waiting += targets
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, site_path(path), content=text if is_page else path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point the links of a page of docs/ to the site."""
    source = page.file.abs_src_path
    return for_site(Path(source))[0] if source and Path(source).is_relative_to(DOCS) else markdown

"""Reads the commands in pages that users follow, in Markdown and comments. Runs nothing."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Every command in these must be in documented_commands.toml.
GUIDES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/serving.md", "docs/operating.md",
                             "docs/faq.md", "docs/extending.md", "docs/install.md")
]  # fmt: skip
# The same for commands in the comments at the top of these.
FILES = [
    *(ROOT / name for name in ("Dockerfile", "docker-compose.yml", "docker-compose.cuda.yml")),
    *sorted((ROOT / "k8s").rglob("*.yaml")), *sorted((ROOT / "monitoring").glob("*.yml")),
]  # fmt: skip
# All others: their commands, flags and routes must exist, but no test runs what they measured with. The log names
# those of its day.
RECORDS = sorted({*(ROOT / "docs").rglob("*.md")} - {*GUIDES, ROOT / "docs" / "performance_log.md"})
PROGRAMS = (
    "apt-get", "curl", "docker", "echo", "git", "grep", "kind", "kubectl", "make", "mini-infer",
    "mini-infer-chat", "mini-infer-demo", "mini-infer-serve", "pip", "pipx", "pytest", "python", "python3",
    "serve", "uv",
)  # fmt: skip
FOLDERS = ("/dev/", "/proc/", "/sys/", "/var/", "/tmp/")  # of a machine: no routes
# A single name of one of these in a sentence is not a command to run.
NAMES = {"serve", "make", "mini-infer", "pipx", "uv tool", "pip install", "kubectl", "docker", "mini-infer-serve"}


@dataclass(frozen=True)
class Page:
    """The parsed parts of one file."""

    path: Path
    blocks: tuple[tuple[str, str], ...]  # (language, text) of every fenced block
    spans: tuple[str, ...]  # `...` outside of them, each on one line

    @property
    def commands(self) -> list[str]:
        """Return the shell commands of the page."""
        found = [line for language, text in self.blocks if language in ("bash", "sh") for line in lines(text)]
        found += [span for span in self.spans if span.split()[0] in PROGRAMS and span not in NAMES]
        return list(dict.fromkeys(found))

    @property
    def flags(self) -> list[str]:
        """Return flags that are written without their program, with values if there are any."""
        return [span for span in self.spans if span.startswith("--") and span != "--"]

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Return (method, path) of the HTTP requests that it names; the method is empty for a path alone."""
        spans = [span for span in self.spans if not f"{span}/".startswith(FOLDERS)]
        pairs = [re.fullmatch(r"(?:(GET|POST) )?(/[a-z0-9_{}/A-Z]+)", span) for span in spans]
        return [(found[1] or "", found[2]) for found in pairs if found]


def lines(text: str) -> Iterator[str]:
    """Return the commands of a shell block, without comments, continued lines joined."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        yield from filter(None, re.sub(r"(^|\s)\s*#\s.*$", "", line).strip().split(" && "))


@functools.cache
def page(path: Path) -> Page:
    """Parse a Markdown page; an indented block is shell when it begins with a program."""
    text = path.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    indented = re.findall(r"(?<=\n\n)((?:    +\S.*\n)+)", prose)
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)
    blocks += [
        ("sh", "\n".join(map(str.strip, block.splitlines())))
        for block in indented
        if block.split()[0].rpartition("/")[2] in PROGRAMS
    ]
    return Page(path, tuple(blocks), tuple(" ".join(span.split()).replace("\\|", "|") for span in spans))


def commands_in_comments(path: Path) -> list[str]:
    """Return the commands of `#   command` lines."""
    return list(lines("\n".join(re.findall(r"^#   (\S.*)$", path.read_text(), re.M))))


@functools.cache
def documented() -> dict[str, list[str]]:
    """Map each command to the pages that have it."""
    found: dict[str, list[str]] = {}
    for path in (*GUIDES, *FILES):
        for command in page(path).commands if path.suffix == ".md" else commands_in_comments(path):
            found.setdefault(command, []).append(str(path.relative_to(ROOT)))
    return found


# -- the same commands where they can be run ----------------------------------------------------------------------

SUBSTITUTES = {"http://127.0.0.1:8000": "{url}", "ROUTER": "{url}", "SmolLM2-135M-Instruct": "dry-run"}
APPENDED = {
    "mini-infer-chat": "--url {url} --max-tokens 32",
    "mini-infer-demo": "--url {url}",
    "mini-infer demo": "--url {url}",
    "mini-infer bench": "--url {url}",
    "mini-infer bench --concurrency": "--num-requests 16",
    "mini-infer simulate --request-rate": "--num-requests 30",
    "curl": "--fail-with-body --silent --show-error",
}


def runnable(command: str, url: str) -> str:
    """Adapt a documented command to the dry-run model of a cluster at `url`."""
    for written, meant in SUBSTITUTES.items():
        command = command.replace(written, meant)
    for prefix, flags in APPENDED.items():
        command += f" {flags}" if command.startswith(prefix) else ""
    return command.replace("{url}", url)


@dataclass(frozen=True)
class Group:
    """An entry of documented_commands.toml: exactly one of the last three says how its commands are run.

    patterns: of commands, in which `*` stands for any text.
    """

    patterns: list[str]
    tests: list[str] = field(default_factory=list)
    script: str = ""
    reason: str = ""

    @property
    def commands(self) -> list[str]:
        """Return the commands of the pages that match."""
        return [command for pattern in self.patterns for command in documented() if matches(pattern, command)]


def matches(pattern: str, command: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), command) is not None


@functools.cache
def groups() -> list[Group]:
    table = tomllib.loads(Path(__file__).with_name("documented_commands.toml").read_text())
    return [Group(entry.pop("commands"), **entry) for entry in table["group"]]


def commands_of(test: str, program: str = "") -> list[str]:
    """Return the commands that a test, `path::name`, runs as written in the pages; all, or those of one program."""
    (found,) = (group.commands for group in groups() if test in group.tests)
    return [command for command in found if command.startswith(program)]

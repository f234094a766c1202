"""Flags, routes and variables of the documentation exist: command lines are parsed by the programs' own parsers."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cli.cluster import flags
from cli.cluster.plan import ServeConfig
from cli.load import bench, demo
from cli.simulation import plan, simulate
from cli.terminal import chat
from cli.top import explain, top
from common.config import ENV_PREFIX, add_arguments
from router.app import create_app
from router.config import HttpConfig, RouterConfig
from tests.deploy.settings import SETTINGS, VARIABLES
from tests.packaging.documentation import GUIDES, RECORDS, ROOT, page

PAGES = (*GUIDES, *RECORDS)
# Placeholders for the reader's own values, and a value that parses.
PLACEHOLDERS = {
    r"(?<=--[pt]p )[NM]\b": "2", r"\bM\b": "dry-run", r"\bMODE\b": "int8-weight", "MODEL": "qwen2.5-7b",
    r"(?<=--decode )\.\.\.": "127.0.0.1:9001", r" \.\.\. ": " ", r"\bSTEPS\b": "1000",
    r" (\||>|2>) ?.*$": "",  # what the shell does with the output
}  # fmt: skip
ENGINE = "benchmarks.engine"
FLAGS_OF_OTHERS = {"--help"}


def arguments_of(text: str) -> list[str]:
    for pattern, value in PLACEHOLDERS.items():
        text = re.sub(pattern, value, text)
    return shlex.split(text)


@functools.cache
def service_parser(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(module)
    for cls in SETTINGS[module]:
        add_arguments(parser, cls)
    return parser


class Parsed(BaseException):
    """Raised when a benchmark has parsed its flags: has its parser and the remaining arguments."""

    def __init__(self, parser: argparse.ArgumentParser, rest: list[str]) -> None:
        self.parser = parser
        self.rest = [word for word in rest if word != "--"]


def benchmark_parser(module: str, arguments: list[str]) -> argparse.ArgumentParser:
    """Return the module's own parser, which has accepted the arguments. Nothing is measured."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self, args=None, namespace=None):
        raise Parsed(self, parse(self, args, namespace)[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            runpy.run_path(str(ROOT / f"{module.replace('.', '/')}.py"), run_name="__main__")
        except Parsed as parsed:
            parser, rest = parsed.parser, parsed.rest
        else:
            pytest.fail(f"{module} parses nothing")
    try:
        flags.build_parser().parse_args(rest)  # what a benchmark does not know is for `serve`,
    except SystemExit:
        if module == ENGINE:
            raise
        benchmark_parser(ENGINE, rest)  # or for the benchmark that it runs
    return parser


def parser_of(command: str) -> argparse.ArgumentParser | None:
    """Return the parser of a command line of ours; None for other programs. Raises SystemExit for a refusal."""
    program, *arguments = arguments_of(command)
    if program == "mini-infer":
        program, *arguments = arguments
    if program == "docker" and arguments[0] == "run":
        while not arguments[0].startswith("mini-infer:"):
            arguments = arguments[1:]
        program, arguments = "python", ["-m", *arguments[1:]]
    if program.endswith("python") and len(arguments) > 1 and arguments[0] == "-m":
        _, program, *arguments = arguments
    arguments = [word for word in arguments if word != "--help"]
    if program.endswith("serve"):
        flags.parse_config(arguments, {})  # with the checks that follow the parser's
        return flags.build_parser()
    if program.startswith("benchmarks.") and "bench_NAME" not in program and not program.endswith("..."):
        return benchmark_parser(program, arguments)
    parsers = {
        "chat": chat.build_parser,
        "demo": demo.build_parser,
        "bench": bench.build_parser,
        "simulate": simulate.build_parser,
        "plan": plan.build_parser,
        "top": top.build_parser,
        "explain": explain.build_parser,
    }
    parsers |= {module: functools.partial(service_parser, module) for module in SETTINGS}
    if make := parsers.get(program.removeprefix("mini-infer-")):
        make().parse_args(arguments)
        return make()
    return None


def parsers_for(path: Path) -> list[argparse.ArgumentParser]:
    """Return the parsers of the page's commands, and those that every page may mean."""
    return [*common_parsers(), *(parser for command in page(path).commands if (parser := parser_of(command)))]


@functools.cache
def common_parsers() -> list[argparse.ArgumentParser]:
    return [flags.build_parser(), bench.build_parser(), top.build_parser(), *map(service_parser, SETTINGS)]


def understands(parser: argparse.ArgumentParser, text: str) -> bool:
    """Whether the parser has these flags and accepts their values, if there are any."""
    words = [word for word in arguments_of(text) if word != "--"]
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    if not all(name in parser._option_string_actions for name in names):
        return False
    if names == words:  # named, not used
        return True
    with contextlib.suppress(SystemExit):
        parser.parse_args(words)
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_flags_exist(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        parsers = parsers_for(path)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    unknown = [text for text in page(path).flags if not any(understands(parser, text) for parser in parsers)]
    assert set(unknown) <= FLAGS_OF_OTHERS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_variables_exist(path: Path) -> None:
    example = re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M)
    known = VARIABLES.union(example, (ENV_PREFIX + field.name.upper() for field in dataclasses.fields(ServeConfig)))
    assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+[A-Z]\b", path.read_text())) <= known


def test_routes_exist() -> None:
    gateway = Mock(config=RouterConfig(decode="host:1"), http=HttpConfig(), base_models=[], memory={})
    routes = create_app(gateway)._router.routes
    seen = set()
    for path in PAGES:
        for method, route in page(path).routes:
            seen.add(route)
            url = re.sub(r"\{\w+\}|/ID\b", "/x", route).replace("//", "/")
            matches = [known.matches({"type": "http", "method": method, "path": url})[0].value for known in routes]
            assert (2 in matches) or (not method and 1 in matches), f"{path.name}: {method} {route}"
    assert seen >= {"/v1/cluster", "/explain/{id}", "/metrics", "/docs"}


def test_defaults_in_brackets_are_the_flags_defaults() -> None:
    defaults: dict[str, set[Any]] = {}
    classes: set[Any] = {ServeConfig}.union(*SETTINGS.values())
    for cls in classes:
        for field in dataclasses.fields(cls):
            defaults.setdefault(field.name, set()).add(field.default)
    found = 0
    for path in PAGES:
        for flag, number in re.findall(r"`--([\w-]+)`\s+\((\d+(?:\.\d+)?)[;)]", path.read_text()):
            assert float(number) in defaults[flag.replace("-", "_")], f"{path.name}: --{flag} ({number})"
            found += 1
    assert found >= 10

"""The flags of all services and of `mini-infer serve`, those of wings among them, one a line.

python -m tests.packaging.flags > tests/packaging/flags.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cli.cluster.flags import build_parser
from common.config import ENV_PREFIX, SettingsParser, add_arguments
from tests.deploy.settings import SETTINGS


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield "serve", build_parser()
    for module, classes in SETTINGS.items():
        parser = SettingsParser(module)
        for cls in classes:
            add_arguments(parser, cls)
        yield module, parser


def lines() -> list[str]:
    """Return program, names, environment variable, values, and the help text, which ends with the default."""
    found = set()
    for program, parser in parsers():
        for name, action in parser._option_string_actions.items():
            if name == action.option_strings[0] and action.dest != "help":
                values = "|".join(action.choices or ()) or action.metavar or "switch"
                names = " ".join(action.option_strings)
                found.add(f"{program} {names} {ENV_PREFIX}{action.dest.upper()} {values}: {action.help}")
    return sorted(found)


if __name__ == "__main__":
    print(*lines(), sep="\n")

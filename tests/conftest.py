"""No test depends on others that its process has run before: random numbers, threads, and what gRPC logs of them.

Tests marked `wing` are skipped where the wing is not, as in the core's copy (tests/wings.py).
"""

from __future__ import annotations

import logging
import random
import sys

import pytest

from common.wings import has_wing

SEED = 1234


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ran-without-wings", default="", help="files of which only cases that need a wing are run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ran = set(config.getoption("--ran-without-wings").split())
    left = [item for item in items if item.nodeid.partition("::")[0] not in ran or item.get_closest_marker("wing")]
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
        items[:] = left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of any scope draw some."""
    random.seed(SEED)
    if torch := sys.modules.get("torch"):  # not every test needs it
        torch.manual_seed(SEED)
        torch.set_num_threads(1)  # cores are shared, and tiny models need no more
    for (wing,) in (mark.args for mark in item.iter_markers("wing")):
        if not has_wing(wing):
            pytest.skip(f"needs the wing {wing}")


def pytest_configure() -> None:
    """Hide an error of gRPC, which is no test's, from those that look at the log.

    All event loops of a process share its queue: what is left in it of an earlier test, whose loop is closed, is
    logged in the next one.
    """
    logging.getLogger("asyncio").addFilter(lambda record: "PollerCompletionQueue" not in record.getMessage())

"""No test depends on others that its process has run before: random numbers, threads, and what gRPC logs of them.

Modules and tests stay to the end: the garbage collector walks neither them, nor as often as it would by itself.
Tests marked `wing` are skipped where the wing is not, as in the core's copy (tests/wings.py).
"""

from __future__ import annotations

import gc
import logging
import random
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from common.wings import has_wing

SEED = 1234
YOUNG_OBJECTS = 10_000  # that wait for the collector; by Python's 700 it took 28% of the CPU time of short tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ran-without-wings", default="", help="files of which only cases that need a wing are run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file that ran without wings if no case of it needs one."""
    ran = {config.rootpath / name for name in _ran_without_wings(config)}
    if collection_path in ran and not re.search(r"mark\.wing|with_wing", collection_path.read_text(encoding="utf-8")):
        return True
    return None  # pytest decides


def _ran_without_wings(config: pytest.Config) -> set[str]:
    return set(config.getoption("--ran-without-wings").split())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ran = _ran_without_wings(config)
    left = {item for item in items if item.nodeid.partition("::")[0] not in ran or item.get_closest_marker("wing")}
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = [item for item in items if item in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures of any scope draw some."""
    random.seed(SEED)
    if torch := sys.modules.get("torch"):  # not every test needs it
        # torch.manual_seed would tell CUDA, too, which keeps a traceback of each call until it is used.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(SEED)
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

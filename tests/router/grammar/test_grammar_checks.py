"""Grammars are checked in another process: any failure there is a refusal, and nothing else waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from common.errors import InvalidRequestError, UnavailableError
from common.grammar import grammar
from router.grammar.grammar_checks import GrammarChecks

SLOW = grammar.json_schema({"type": "string", "allOf": [{"pattern": f".*[{c}].*"} for c in "abcdefghijklmnopqrst"]})


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks()
    yield made
    made.close()


async def test_a_usable_grammar_passes_and_another_is_refused_by_name(checks: GrammarChecks) -> None:
    await checks.check(grammar.json_object())
    with pytest.raises(InvalidRequestError, match="look-around"):
        await checks.check("regex:(?=a)b")


async def test_a_grammar_that_takes_long_is_refused_and_the_loop_goes_on(checks: GrammarChecks) -> None:
    """The second time it is refused without another check."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(InvalidRequestError, match=r"0.25 s to compile"):
        await checks.check(SLOW)
    ticking.cancel()
    assert ticks >= 10
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError, match=r"0.25 s to compile"):
        await checks.check(SLOW)
    assert time.perf_counter() - began < 0.1
    await checks.check("regex:after it")


async def test_a_process_that_has_ended_is_started_again(checks: GrammarChecks) -> None:
    await checks.check("regex:one")
    assert checks._process is not None
    checks._process.kill()
    checks._process.wait()
    with pytest.raises(UnavailableError):
        await checks.check("regex:two")
    await checks.check("regex:two")


async def test_without_a_process_nothing_can_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarChecks()
    monkeypatch.setattr("router.grammar.grammar_checks.sys.executable", "/bin/true")
    with pytest.raises(UnavailableError):
        await made.check("regex:one")
    made.close()

"""Scheduling policies of users: the example, and policies that fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from engine.custom_policies.guarded import GuardedOrder
from engine.custom_policies.load import load_policy
from engine.offline.llm import LLM
from engine.request import SamplingParams
from engine.scheduling.policy import RequestView
from examples.scheduling_policy import TOKENS_PER_ARRIVAL
from tests.engine.driving import finish
from tests.engine.priorities.test_priorities import LONG, assert_undisturbed, start
from tests.engine.scheduling.engines import assert_quiet, make_engine, run_all

EXAMPLE = "examples.scheduling_policy:ShortestPromptFirst"


def test_the_example_serves_short_prompts_first_and_lets_long_ones_age() -> None:
    policy = load_policy(EXAMPLE)

    def key(arrival: int, num_tokens: int) -> tuple[float, ...]:
        return policy.key(RequestView(0, arrival, num_tokens, 0, 16))

    assert key(1, 10) < key(0, 10 * TOKENS_PER_ARRIVAL)
    assert key(11, 10) > key(0, 10 * TOKENS_PER_ARRIVAL)


def test_the_example_serves_an_engine() -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompts = [[7] * 6, [5] * 400, [6] * 8]
    orders, texts = [], []
    for policy in ("fcfs", EXAMPLE):
        llm = LLM("dry-run", device="cpu", max_num_seqs=1, num_gpu_blocks=64, scheduling_policy=policy)
        requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
        orders.append([requests.index(output.request) for output in finish(llm.engine) if output.finish_reason])
        texts.append([request.output_token_ids for request in requests])
    assert orders == [[0, 1, 2], [0, 2, 1]]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "lifo", "choose priority, fcfs or module:Class"),
        ("", "user_policy:", "choose priority, fcfs or module:Class"),
        ("", "no_such_module:Policy", "cannot import no_such_module .*PYTHONPATH"),
        ("1 / 0", "user_policy:Policy", "cannot import user_policy .ZeroDivisionError"),
        ("", "user_policy:Policy", "user_policy has no class Policy"),
        ("class Policy: pass", "user_policy:Policy", "Policy does not work .AttributeError: .*'key'"),
        ("class Policy:\n def __init__(self, x): pass", "user_policy:Policy", "Policy does not work .TypeError"),
        (
            "class Policy:\n def key(self, r): return r.size",
            "user_policy:Policy",
            "does not work .AttributeError: .*size",
        ),
        ("class Policy:\n def key(self, r): return 'first'", "user_policy:Policy", "must return a tuple of numbers"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_at_the_start(
    source: str, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_policy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_policy", raising=False)
    with pytest.raises(ConfigError, match=f"--scheduling-policy {name}: .*{message}"):
        LLM("dry-run", device="cpu", scheduling_policy=name)


def fail(*_: object) -> bool:
    raise ValueError("told to fail")


@pytest.mark.parametrize(
    ("method", "answer"), [("key", fail), ("admits", fail), ("preempts", fail), ("key", lambda *_: (float("nan"),))]
)
def test_a_policy_that_fails_is_replaced_and_no_request_lost(
    method: str, answer: Callable[..., object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(EXAMPLE)
    engine, _ = make_engine(12, host_slots=32, max_num_seqs=2, swap=True, overlap=True, order=GuardedOrder(policy))
    requests = start(engine, [[1] * 5, [2] * 5])
    monkeypatch.setattr(policy, method, answer)
    for priority in (0, 7, 1):
        requests.append(engine.add_request([3 + priority] * 5, LONG, priority=priority))
    with caplog.at_level(logging.ERROR):
        run_all(engine)
    assert_undisturbed(requests)
    assert_quiet(engine)
    [record] = caplog.records  # once, with its traceback
    assert record.getMessage() == (
        "scheduling policy ShortestPromptFirst failed; the engine goes on with the policy 'priority'"
    )
    assert record.exc_info is not None

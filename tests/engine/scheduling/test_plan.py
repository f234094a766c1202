"""A step plan is data: it round-trips through bytes, and a fresh runner given these computes the same."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.assembly import EngineParts, assemble
from engine.cpu.runner import CpuRunner
from engine.kv.memory import allocate_pool
from engine.loader.load import load_model
from engine.plan import CompletedStep, NewRequest, ScheduledRow, StepPlan, StepResult
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestStates
from kvstore.types import BlockId
from tests.engine.driving import engine_config

ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepPlan)
PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.7,
    seed=(1 << 64) - 1,
    stop_token_ids=(3, 4),
    logit_bias=((5, -1.5),),
    bad_words=((1, 2), (9,)),
)


def record(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, StepResult]]:
    """Return a list that collects every plan of the engine, encoded at launch, and its result."""
    steps: list[tuple[bytes, StepResult]] = []
    launch = parts.runner.launch

    def launch_and_record(plan: StepPlan) -> CompletedStep:
        data = ENCODER.encode(plan)
        step: CompletedStep = launch(plan)
        steps.append((data, step.found))
        return step

    monkeypatch.setattr(parts.runner, "launch", launch_and_record)
    return steps


@pytest.mark.wing("kvstore.tier")
@pytest.mark.parametrize(
    ("preemption", "num_drafts"),
    [("recompute", 0), ("swap", 0), pytest.param("swap", 3, marks=pytest.mark.wing("engine.speculation"))],
)
def test_a_recorded_run_replayed_gives_the_same_tokens(
    preemption: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemption, cached prefixes, an abort, drafts, and parameters that read a request's own tokens."""
    config = engine_config(
        "dry-run", device="cpu", block_size=8, num_gpu_blocks=22, max_num_seqs=4, max_num_batched_tokens=48,
        host_tier_gb=0.01, preemption=preemption, prefix_cache=True, num_speculative_tokens=num_drafts, ngram_min=1,
    )  # fmt: skip
    parts = assemble(config)
    steps = record(parts, monkeypatch)
    engine = parts.engine
    requests = [
        engine.add_request(
            [*range(10, 30), *range(index, index + 7)],
            SamplingParams(
                max_tokens=40, temperature=index % 2, seed=index, ignore_eos=True, logprobs=2,
                repetition_penalty=1.3, bad_words=((1, 2),), prompt_logprobs=1 if index == 3 else None,
            ),
        )
        for index in range(6)
    ]  # fmt: skip
    while engine.has_work():
        if engine.num_steps == 12:
            engine.abort(requests[1].request_id)
        engine.step()
    assert engine.load().num_preemptions > 0
    assert any(DECODER.decode(data).finished for data, _ in steps)
    assert any(row.draft_token_ids for data, _ in steps for row in DECODER.decode(data).rows) == bool(num_drafts)

    loaded = load_model(parts.files, config)
    host = torch.zeros(64, parts.geometry.block_bytes, dtype=torch.uint8)
    fresh = CpuRunner(loaded, allocate_pool(parts.geometry, loaded.device), host, config)
    for data, found in steps:
        replayed = fresh.launch(DECODER.decode(data)).result()
        assert replayed.token_ids == found.token_ids
        assert replayed.logprobs == found.logprobs
        assert replayed.prompt_logprobs == found.prompt_logprobs


def test_a_runner_keeps_what_plans_said() -> None:
    states = RequestStates()
    rows = [ScheduledRow(RequestId("a"), 0, 2, True, (BlockId(4),))]
    (first,) = states.apply(StepPlan([NewRequest(RequestId("a"), [1, 2], 2, PARAMS)], rows))
    first.put_token(2, 9)
    (again,) = states.apply(StepPlan(rows=[ScheduledRow(RequestId("a"), 2, 1, True, (BlockId(7),))]))
    assert again is first
    assert (again.token_ids, again.output_token_ids, again.block_ids) == ([1, 2, 9], [9], [4, 7])
    again.put_token(2, 5)  # the row was computed again
    assert again.token_ids == [1, 2, 5]
    assert states.needs_tokens([ScheduledRow(RequestId("a"), 3, 1, True)])
    assert not states.needs_tokens([ScheduledRow(RequestId("a"), 2, 1, True)])
    with pytest.raises(KeyError):
        states.apply(StepPlan(finished=[RequestId("a")], rows=rows))

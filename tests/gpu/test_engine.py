"""The GPU engine against the plain float32 engine: same tokens, whatever the steps look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.assembly
from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.engine import Engine
from engine.gpu.attention.backend import GpuInputs
from engine.gpu.runner import GpuRunner
from engine.request import SamplingParams, TokenLogprobs
from engine.request_states import RequestState
from tests.gpu.models import save_tiny_model, use_small_tiles

ON_GPU = torch.cuda.is_available()
PLAIN = GpuConfig(overlap=False, use_cuda_graph=False)
PROMPTS = [[(7 * i + 3 * j * j) % 97 for j in range(length)] for i, length in enumerate((5, 19, 33, 12))]


def reference(model: Path) -> Engine:
    return assemble(
        EngineConfig(str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64)
    ).engine


def open_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, gpu: GpuConfig, dtype: str = "float32", **settings: Any
) -> tuple[Engine, GpuRunner]:
    if not ON_GPU:  # the same runner, its kernels interpreted
        monkeypatch.setattr(engine.assembly, "_make_runner", GpuRunner)
    settings = {
        "quant_mode": "none",
        "num_gpu_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 96,
        **settings,
    }
    config = EngineConfig(
        str(model), device="cuda" if ON_GPU else "cpu", dtype=dtype, **settings
    )  # fmt: skip
    parts = assemble(config, gpu=gpu)
    parts.engine.eos_token_ids = frozenset()
    return parts.engine, parts.runner


def generate(
    made: Engine, params: Sequence[SamplingParams], prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    requests = [made.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=False)]
    run(made)
    return [request.output_token_ids for request in requests]


def assert_same_logprobs(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs]) -> None:
    for entry, other in zip(ours, theirs, strict=True):
        assert (entry.token_id, entry.rank, entry.top_token_ids) == (other.token_id, other.rank, other.top_token_ids)
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)


def run(made: Engine) -> None:
    for _ in range(300):
        if not made.has_work():
            return
        for output in made.step().outputs:
            assert output.error is None
    raise AssertionError("the engine does not end")


def greedy(num_tokens: int = 6) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)] * len(PROMPTS)


@pytest.fixture(scope="session")
def expected(model: Path) -> list[list[int]]:
    return generate(reference(model), greedy())


@pytest.mark.parametrize(
    ("gpu", "settings"),
    [
        (PLAIN, {}),
        (GpuConfig(use_cuda_graph=False), {}),
        (GpuConfig(), {"max_num_batched_tokens": 16}),
        (GpuConfig(), {"max_num_seqs": 1}),
        (GpuConfig(), {"num_gpu_blocks": 22, "block_size": 4, "max_model_len": 88}),
        (
            GpuConfig(),
            {"num_gpu_blocks": 22, "block_size": 4, "max_model_len": 88, "preemption": "swap", "host_tier_gb": 0.01},
        ),
        (GpuConfig(), {"block_size": 4, "prefix_cache": False}),
    ],
    ids=["plain", "overlap", "chunks", "batch-1", "recompute", "swap", "small-blocks"],
)
def test_greedy_tokens_do_not_depend_on_the_steps(
    gpu: GpuConfig, settings: dict[str, Any], model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = open_gpu(model, monkeypatch, gpu, **settings)
    prompts = PROMPTS[:1] if settings.get("max_num_seqs") == 1 else PROMPTS  # one row's kernels are slow to interpret
    assert generate(made, greedy(), prompts) == expected[: len(prompts)]
    if settings.get("num_gpu_blocks") == 22:
        assert made.load().num_preemptions > 0


def test_experts_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of twelve experts per token: most tiles have one pair. `test_expert_loads.py` has tiles of several."""
    model = save_tiny_model(tmp_path, inner=32, num_experts=12)
    use_small_tiles(monkeypatch, 6)
    expected = generate(reference(model), greedy())
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    assert generate(made, greedy()) == expected


def test_cached_prefix_gives_the_same_tokens(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), block_size=8)
    assert generate(made, greedy()) == expected
    assert generate(made, greedy()) == expected
    assert made.kv.stats.hit_tokens > 0


@pytest.mark.parametrize("when", ["prompts", "decoding"])
def test_after_a_step_that_failed_on_its_way_tokens_are_the_same(
    when: str, model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has half of the step's inputs, as when memory runs out."""
    made, runner = open_gpu(model, monkeypatch, GpuConfig(use_cuda_graph=False), block_size=8)
    forward, failures = runner._forward.hidden, []

    def hidden(inputs: GpuInputs) -> torch.Tensor:
        if not failures and inputs.has_prompts == (when == "prompts"):
            failures.append(when)
            raise torch.OutOfMemoryError("told to fail")
        return forward(inputs)

    monkeypatch.setattr(runner._forward, "hidden", hidden)
    assert generate(made, greedy()) == expected
    assert (failures, made.num_failed_steps) == ([when], 1)


def test_seeded_draws_equal_those_of_the_plain_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.8, seed=2, top_k=5, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.0, presence_penalty=0.9, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=1.2, seed=4, top_p=0.8, ignore_eos=True),
    ]
    want = generate(reference(model), params)
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    assert generate(made, params) == want


def test_abort_in_flight_leaves_the_others_alone(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    requests = [made.add_request(prompt, params) for prompt, params in zip(PROMPTS, greedy(), strict=True)]
    for _ in range(3):
        made.step()
    made.abort(requests[1].request_id)
    run(made)
    assert [requests[i].output_token_ids for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
    made.kv.pool.check_integrity()


def test_16_bit_logits_are_near_those_of_float32(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are forced to the reference's tokens; the logits of every step are compared."""
    plain = assemble(EngineConfig(str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64))
    want = forced_logits(plain.engine, plain.runner, expected)
    made, runner = open_gpu(model, monkeypatch, PLAIN, dtype="bfloat16" if ON_GPU else "float16")
    got = forced_logits(made, runner, expected)
    for one, other in zip(want, got, strict=True):
        assert float((one - other).norm() / one.norm()) < 2e-2


def forced_logits(made: Engine, runner: Any, tokens: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return the logits (tokens, vocab) of each prompt while its output is forced."""
    seen: dict[str, list[torch.Tensor]] = {}
    for index, (prompt, params) in enumerate(zip(PROMPTS, greedy(), strict=True)):
        request = made.add_request(prompt, params)
        seen[request.request_id] = []

        def force(request: RequestState, row: torch.Tensor, index: int = index) -> None:
            seen[request.request_id].append(row.float().cpu().clone())
            row[tokens[index][len(request.output_token_ids)]] = 1e4

        runner.hooks[request.request_id] = force
    run(made)
    return [torch.stack(rows) for rows in seen.values()]


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("windowed"))
    raw = json.loads((path / "config.json").read_text())
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    (path / "config.json").write_text(json.dumps({**raw, **window}))
    return path


def logprobs_of(made: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[list[TokenLogprobs]]:
    """Return log-probabilities of sampled tokens; greedy ones would repeat the prompt's last, with any window."""
    found: dict[int, list[TokenLogprobs]] = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6, temperature=2.0, seed=index, ignore_eos=True, logprobs=2)
        found[id(made.add_request(prompt, params))] = []
    while made.has_work():
        for output in made.step().outputs:
            found[id(output.request)] += output.logprobs
    return list(found.values())


def test_windows(windowed: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks before the window are freed while steps are in flight; the second round finds cached prefixes."""
    alone = logprobs_of(reference(windowed))
    everywhere = logprobs_of(reference(model))
    assert max(abs(a.top_logprobs[1] - b.top_logprobs[1]) for a, b in zip(alone[2], everywhere[2], strict=True)) > 0.1
    made, _ = open_gpu(
        windowed, monkeypatch, GpuConfig(), num_gpu_blocks=22, block_size=4, max_num_batched_tokens=16,
        preemption="swap", host_tier_gb=0.01,
    )  # fmt: skip
    for _ in range(2):
        for ours, theirs in zip(logprobs_of(made), alone, strict=True):
            assert_same_logprobs(ours, theirs)
    made.kv.pool.check_integrity()
    assert made.kv.pool.num_used == 0
    assert made.num_failed_steps == 0


def test_other_attention_backends_know_no_windows(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="fa3 knows no sliding windows; use triton"):
        open_gpu(windowed, monkeypatch, GpuConfig(attention_backend="fa3"))

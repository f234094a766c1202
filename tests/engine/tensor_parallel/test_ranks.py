"""Ranks of a model: the tokens of one rank, for every family; processes that start, follow and end as they should."""

from __future__ import annotations

import gc
import json
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import engine.assembly
from common.errors import ConfigError
from common.model_files import resolve_model
from engine import LLM, SamplingParams
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.kv.memory import allocate_pool, pool_geometry
from engine.loader.load import LoadedModel, load_model
from engine.plan import CompletedStep, StepPlan
from engine.runner import Proposer
from engine.start_progress import OnProgress
from engine.tensor_parallel.assembly import cpu_ranks
from kvstore.layout import Shard
from tests.engine.conftest import Greedy
from tests.engine.driving import answers, engine_config, finish, num_drafts
from tests.engine.expert_balancing.balancing import balancing_of
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.tiny_models import TINY_MODELS, UNLIKE_WHEN_DIVIDED, VOCAB_SIZE
from tests.harness.processes import followers_of

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_TOKENS = 8
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 9 * i)] for i in range(6)]
# Of models with KV groups.
SCARCE_BLOCKS = {"gemma3": 93, "gpt-oss": 28, "mistral-window": 13, "qwen2-moe-windows": 28}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


class ThreadGroup:
    """A `Group` of threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=200.0)
        self._parts: list[Any] = [None] * size
        self._local = threading.local()

    @property
    def rank(self) -> int:
        rank: int = self._local.rank
        return rank

    def join(self, rank: int) -> None:
        """The calling thread is this rank from now on."""
        self._local.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack([part.float() for part in self._exchange(x)]).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        pieces = [part[self.rank] for part in self._exchange(x.split(list(send)))]
        assert [piece.shape[0] for piece in pieces] == list(receive)
        return torch.cat(pieces)

    def _exchange(self, x: Any) -> list[Any]:
        self._parts[self.rank] = x
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


OF_RANKS: dict[str, Any] = {}  # settings of ranks that one rank cannot have


class ThreadedRanks:
    """A runner whose ranks are threads, each of which is given the plan's bytes."""

    max_steps_in_flight = 1

    def __init__(
        self, loaded: LoadedModel, pool: Tensor, host_buffer: Tensor | None, config: EngineConfig, num_ranks: int
    ) -> None:
        self._group = ThreadGroup(num_ranks)
        self._executor = ThreadPoolExecutor(num_ranks)
        config = replace(config, tp=num_ranks, **OF_RANKS)
        files = resolve_model(config.model)
        self._ranks: list[CpuRunner] = []
        for rank in range(num_ranks):
            self._group.join(rank)
            shard = load_model(files, config, CPU, Shard(rank, num_ranks))
            assert shard.fingerprint == loaded.fingerprint
            geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype, Shard(rank, num_ranks))
            slots = None
            if host_buffer is not None:
                slots = torch.zeros(host_buffer.shape[0], geometry.block_bytes, dtype=torch.uint8)
            self._ranks.append(
                CpuRunner(shard, allocate_pool(geometry, CPU), slots, config, cpu_ranks(shard, config, self._group))
            )
        self.attention_backend = self._ranks[0].attention_backend

    def launch(self, plan: StepPlan) -> CompletedStep:
        data = msgspec.msgpack.encode(plan)
        found = list(self._executor.map(lambda rank: self._run(rank, data), range(len(self._ranks))))
        assert all(one.found.token_ids == found[0].found.token_ids for one in found), (
            "ranks have sampled different tokens"
        )
        return found[0]

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        return False

    def propose_with(self, proposer: Proposer) -> None:
        self._ranks[0].propose_with(proposer)

    def check(self) -> None:
        pass

    def warmup(self, on_progress: OnProgress) -> None:
        pass

    def _run(self, rank: int, data: bytes) -> CompletedStep:
        self._group.join(rank)
        step = self._ranks[rank].launch(msgspec.msgpack.decode(data, type=StepPlan))
        assert isinstance(step, CompletedStep)
        return step


def open_ranks(path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch, **settings: object) -> EngineParts:
    """An engine over threads instead of processes."""
    monkeypatch.setattr(
        engine.assembly,
        "_make_runner",
        lambda loaded, pool, host, config, _gpu, _length: ThreadedRanks(loaded, pool, host, config, num_ranks),
    )
    base = {"model": str(path), "device": "cpu", "dtype": "float32", "num_gpu_blocks": 256, "num_threads": 1}
    return assemble(EngineConfig(**{**base, **settings}))  # type: ignore[arg-type]


def answers_of(parts: EngineParts, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Tokens after PROMPTS, which are run together."""
    return answers(parts.engine, PROMPTS, params)


@pytest.mark.parametrize("name", UNLIKE_WHEN_DIVIDED)
def test_two_ranks_of_every_family_equal_transformers(
    name: str, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an odd vocabulary, which is padded, cached prefixes, chunks, and swaps."""
    path, expected = greedy(TINY_MODELS[name], PROMPTS, NUM_TOKENS)
    parts = open_ranks(
        path, 2, monkeypatch, num_gpu_blocks=SCARCE_BLOCKS.get(name, 24), block_size=4, max_num_batched_tokens=24,
        max_num_seqs=6, preemption="swap", host_tier_gb=0.01,
    )  # fmt: skip
    for _ in range(2):
        assert answers_of(parts) == expected
    assert parts.engine.load().num_preemptions > 0
    assert parts.engine.num_failed_steps == 0


@pytest.mark.usefixtures("forked_followers")
def test_ranks_that_dispatch_to_whole_experts_equal_transformers(
    greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, which exchange experts while they compute."""
    path, expected = greedy(TINY_MODELS["qwen3-moe"], PROMPTS, NUM_TOKENS)
    config = engine_config(
        str(path), device="cpu", dtype="float32", tp=2, expert_parallel=True, expert_exchange="dispatch",
        num_gpu_blocks=64, num_threads=1, num_redundant_experts=2, expert_rebalance_interval=3,
    )  # fmt: skip
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_CHOICES_A_SLOT", 1)
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_GAIN", 1.0)
    parts = assemble(config)
    for _ in range(2):
        assert answers_of(parts) == expected
    rebalancer = balancing_of(parts).rebalancer
    assert rebalancer is not None
    assert rebalancer.num_changes > 1


@pytest.mark.parametrize(
    ("name", "num_ranks", "exchange"),
    [
        ("qwen3-moe", 2, "sum"),
        ("qwen3-moe-some-dense", 2, "dispatch"),
        ("gpt-oss", 2, "dispatch"),
        ("qwen2-moe", 2, "dispatch"),
        ("qwen3-moe", 4, "dispatch"),
        ("deepseek-v2-lite", 2, "sum"),
        ("deepseek-v3", 4, "dispatch"),
    ],
)
def test_ranks_of_whole_experts_equal_transformers(
    name: str, num_ranks: int, exchange: str, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside decode rows, and steps of fewer rows than ranks."""
    tiny = TINY_MODELS[name]
    if num_ranks == 4:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if "deepseek" in name else 2}
        tiny = replace(tiny, changes={**tiny.changes, **heads, "num_experts": 8, "n_routed_experts": 8})
    path, expected = greedy(tiny, PROMPTS, NUM_TOKENS)
    monkeypatch.setitem(OF_RANKS, "expert_parallel", True)
    monkeypatch.setitem(OF_RANKS, "expert_exchange", exchange)
    parts = open_ranks(path, num_ranks, monkeypatch, max_num_batched_tokens=24)
    assert answers_of(parts, replace(GREEDY, prompt_logprobs=0)) == expected
    assert parts.engine.num_failed_steps == 0


@pytest.mark.parametrize(
    ("name", "exchange"), [("qwen3-moe", "sum"), ("qwen3-moe-some-dense", "dispatch"), ("gpt-oss", "sum")]
)
def test_ranks_of_placed_experts_equal_transformers(
    name: str, exchange: str, tmp_path: Path, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads that one engine has counted place the experts of two ranks, two redundant ones among them."""
    tiny, loads = TINY_MODELS[name], tmp_path / "loads.json"
    path, expected = greedy(tiny, PROMPTS, NUM_TOKENS)
    parts = assemble(
        engine_config(
            str(path), device="cpu", dtype="float32", num_gpu_blocks=256, num_threads=1, expert_load_file=str(loads)
        )
    )
    assert answers_of(parts) == expected
    del parts
    gc.collect()
    counted = json.loads(loads.read_text())
    layers = [layer for layer in counted["layers"] if layer]
    num_routed = sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
    assert layers
    assert len({sum(layer) for layer in layers}) == 1
    assert sum(layers[0]) % num_routed == 0  # every token, as often as it has experts
    for layer in layers:
        layer[0] += 10 * sum(layer)  # by far the hottest
    loads.write_text(json.dumps(counted))
    for setting, value in {
        "expert_parallel": True, "expert_exchange": exchange, "expert_placement": str(loads),
        "num_redundant_experts": 2,
    }.items():  # fmt: skip
        monkeypatch.setitem(OF_RANKS, setting, value)
    parts = open_ranks(path, 2, monkeypatch, max_num_batched_tokens=24)
    assert answers_of(parts) == expected


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_ranks_of_8_bit_kv_scale_their_heads_as_one_rank_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TINY_MODELS[name].save(tmp_path)
    found = []
    for num_ranks in (1, 2):
        found.append(answers_of(open_ranks(path, num_ranks, monkeypatch, kv_cache_dtype="fp8")))
    assert found[0] == found[1]


@pytest.mark.parametrize("quant_mode", ["int8-weight", "int4-weight"])
def test_ranks_quantize_their_shards(quant_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, so that scales of divided inputs are finer than one rank's: close, not equal."""
    path = TINY_MODELS["qwen2"].save(tmp_path)
    params = replace(GREEDY, max_tokens=1, logprobs=5)
    found = []
    for num_ranks in (1, 2):
        parts = open_ranks(path, num_ranks, monkeypatch, quant_mode=quant_mode, dtype="bfloat16")
        assert parts.quantization == quant_mode
        requests = [parts.engine.add_request(prompt, params) for prompt in PROMPTS]
        outputs = sorted(finish(parts.engine), key=lambda output: requests.index(output.request))
        entries = [entry for output in outputs for entry in output.logprobs]
        found.append([dict(zip(each.top_token_ids, each.top_logprobs, strict=True)) for each in entries])
    differences = [
        abs(one[token_id] - two[token_id])
        for one, two in zip(*found, strict=True)
        for token_id in one.keys() & two.keys()
    ]
    assert len(differences) > 4 * len(PROMPTS)
    assert 0 < max(differences) < 0.2


def test_ranks_accept_the_same_drafts(greedy: Greedy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts travel in the plan, and every rank finds for itself which of them hold."""
    path, expected = greedy(TINY_MODELS["llama"], PROMPTS, NUM_TOKENS)
    known = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    draft_with(monkeypatch, MakeOracle(knows(known), 0.7, VOCAB_SIZE))
    parts = open_ranks(
        path, 2, monkeypatch, num_speculative_tokens=4, adaptive_drafts=False, num_gpu_blocks=24, block_size=4
    )
    assert answers_of(parts) == expected
    drafted, accepted = num_drafts(parts.engine)
    assert 0 < accepted < drafted


def own_followers() -> list[int]:
    """Of this process, without those of engines that other tests have left to the collector of garbage."""
    gc.collect()
    return followers_of(os.getpid())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 3}, "3 ranks cannot divide 4 query heads"),
        ({"tp": 0}, "choose 1 to 256"),
        ({"pp": 3}, "--pp 3: the model has 2 layers"),
        ({"pp": 0}, "choose 1 to 64"),
        ({"pp": 2, "itl_objective_ms": 20.0}, "--itl-objective-ms"),
    ],
    ids=str,
)
def test_a_model_that_ranks_cannot_divide_is_refused_before_any_starts(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float], told: str
) -> None:
    monkeypatch.setattr(engine.assembly, "_start_ranks", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=told):
        assemble(EngineConfig("dry-run", device="cpu", num_gpu_blocks=64, **settings))  # type: ignore[arg-type]


def test_ranks_that_end_with_their_engine_are_not_lost() -> None:
    llm = LLM("dry-run", tp=2, num_gpu_blocks=64)
    assert len(own_followers()) == 1
    lost: queue.Queue[str] = queue.Queue()
    llm.engine._runner.watch_ranks(lost.put)  # type: ignore[attr-defined]
    del llm
    assert own_followers() == []
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)

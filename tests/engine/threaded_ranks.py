"""Ranks and stages of a model in threads of this process, and requests for them."""

from __future__ import annotations

import gc
import json
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.assembly
from common.model_files import resolve_model
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.kv.memory import allocate_pool, pool_geometry
from engine.loader.load import LoadedModel, load_model
from engine.plan import StepPlan, StepResult
from engine.ranks import Ranks
from engine.request import SamplingParams, TokenId
from engine.tensor_parallel.assembly import cpu_ranks
from engine.tensor_parallel.follower import follow
from engine.tensor_parallel.followers import STEP_ENCODER, FollowerStep, place_of
from engine.tensor_parallel.runner import ParallelRunner, ParallelStep
from tests.engine.driving import answers
from tests.engine.tiny_models import VOCAB_SIZE
from tests.harness.processes import followers_of

CPU = torch.device("cpu")
WAIT_SECONDS = 60.0
NUM_TOKENS = 8
PROMPTS = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(3 + 9 * i)] for i in range(6)]
# For models with KV groups.
SCARCE_BLOCKS = {"gemma3": 93, "gpt-oss": 28, "mistral-window": 13, "qwen2-moe-windows": 28}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
OF_RANKS: dict[str, Any] = {}  # settings that need several ranks


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
        """Make the calling thread this rank from now on."""
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


class QueueLink:
    """Both ends of the link between two stages."""

    def __init__(self) -> None:
        self._sent: queue.Queue[Tensor] = queue.Queue()

    def send(self, hidden: Tensor) -> None:
        self._sent.put(hidden.clone())

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self._sent.get(timeout=WAIT_SECONDS))


class ThreadedFollowers:
    """Stands in for `Followers`: all ranks but `local`, in threads that are given the plans' bytes."""

    def __init__(
        self, whole: LoadedModel, host_buffer: Tensor | None, config: EngineConfig, tp: int, pp: int
    ) -> None:
        files, config = resolve_model(config.model), replace(config, tp=tp, pp=pp, **OF_RANKS)
        self._plans: list[queue.Queue[bytes]] = []
        links = [[None, *(QueueLink() for _ in range(pp - 1)), None] for _ in range(tp)]
        groups = [ThreadGroup(tp) if tp > 1 else None for _ in range(pp)]
        for number in range(tp * pp):
            shard, stage = place_of(number, config)
            index = 0 if stage is None else stage.index
            loaded = load_model(files, config, CPU, shard, stage=stage)
            assert loaded.fingerprint == whole.fingerprint
            geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype, loaded.shard)
            slots = None
            if host_buffer is not None:
                slots = torch.zeros(host_buffer.shape[0], geometry.block_bytes, dtype=torch.uint8)
            group, ends = groups[index], links[shard.rank][index : index + 2]
            if group is not None:
                group.join(shard.rank)
            runner = CpuRunner(
                loaded, allocate_pool(geometry, CPU), slots, config, cpu_ranks(loaded, config, group, *ends)
            )
            if number == 0:
                self.local = runner
                continue
            plans: queue.Queue[bytes] = queue.Queue()
            threading.Thread(target=_follow, args=(plans, runner, group, shard.rank), daemon=True).start()
            self._plans.append(plans)
        if group := groups[-1]:
            group.join(0)

    def send(self, plan: StepPlan, num_finished: int, sampled: Sequence[Sequence[Sequence[TokenId]]]) -> None:
        for plans in self._plans:
            plans.put(STEP_ENCODER.encode(FollowerStep(plan, num_finished, sampled)))

    def check(self) -> None:
        pass

    def forget_store(self) -> None:
        pass


def _follow(plans: queue.Queue[bytes], runner: CpuRunner, group: ThreadGroup | None, rank: int) -> None:
    if group is not None:
        group.join(rank)
    follow(plans.get, runner)


class UnwarmedRunner(ParallelRunner):
    """A runner for stages in threads, which skip the warm-up."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.in_flight: list[ParallelStep] = []

    def warmup(self, *_: object) -> None:
        pass

    def launch(self, plan: StepPlan) -> ParallelStep:
        self.in_flight.append(super().launch(plan))
        return self.in_flight[-1]

    def finish(self, step: ParallelStep) -> StepResult:
        self.in_flight.remove(step)
        return super().finish(step)


def threaded_runner(
    whole: LoadedModel, host: Tensor | None, config: EngineConfig, tp: int, pp: int
) -> UnwarmedRunner:
    followers = ThreadedFollowers(whole, host, config, tp, pp)
    is_pipeline = pp > 1
    return UnwarmedRunner(followers.local, followers, pp * is_pipeline, is_eager=is_pipeline)


def open_stages(
    path: Path, count: int, monkeypatch: pytest.MonkeyPatch, tp: int = 1, **settings: object
) -> EngineParts:
    """Open an engine over stages of `tp` ranks each."""

    def make(whole: LoadedModel, _pool: Tensor, host: Tensor | None, config: EngineConfig, *_: object) -> Any:
        return threaded_runner(whole, host, config, tp, count)

    monkeypatch.setattr(engine.assembly, "_make_runner", make)
    monkeypatch.setattr(Ranks, "num_stages", count)
    base = {"model": str(path), "device": "cpu", "dtype": "float32", "num_gpu_blocks": 256, "num_threads": 1}
    return assemble(EngineConfig(**{**base, **settings}))  # type: ignore[arg-type]


def open_ranks(path: Path, count: int, monkeypatch: pytest.MonkeyPatch, **settings: object) -> EngineParts:
    """Open an engine over ranks that hold all layers."""
    return open_stages(path, 1, monkeypatch, count, **settings)


def answers_of(parts: EngineParts, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the tokens after PROMPTS, which run together."""
    return answers(parts.engine, PROMPTS, params)


def own_followers() -> list[int]:
    """Return this process' followers, without those of other tests' engines that await garbage collection."""
    gc.collect()
    return followers_of(os.getpid())


def place_experts(
    monkeypatch: pytest.MonkeyPatch, loads: Path, layers: list[list[int]], exchange: str = "dispatch"
) -> None:
    """Give ranks whole experts from now on, placed by these loads, with two replicas."""
    loads.write_text(json.dumps({"num_experts": len(layers[0]), "layers": layers}))
    for setting, value in {
        "expert_parallel": True, "expert_exchange": exchange, "expert_placement": str(loads),
        "num_redundant_experts": 2,
    }.items():  # fmt: skip
        monkeypatch.setitem(OF_RANKS, setting, value)

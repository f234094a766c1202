"""Runs plans without a scheduler: requests with shuffled block tables, chunked prefill, mixed steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.model_files import ModelFiles
from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.engine import Engine
from engine.kv.memory import allocate_pool, kv_layout, pool_geometry
from engine.loader.load import LoadedModel, load_model
from engine.plan import ScheduledRow, StepPlan, StepResult
from engine.request import Request, RequestId, RequestOutput, SamplingParams, TokenLogprobs
from engine.scheduled_step import ScheduledStep, StepOutcome
from kvstore.types import BlockId

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, seed=0)


def open_model(files: ModelFiles, **settings: Any) -> tuple[LoadedModel, EngineConfig]:
    settings = {"device": "cpu", "num_gpu_blocks": 256, "block_size": 8, **settings}
    config = EngineConfig(**settings)
    return load_model(files, config), config


def engine_config(model: str = "", **settings: Any) -> EngineConfig:
    """Make settings of the core and of wings; type checkers know only those of the core."""
    return EngineConfig(model, **settings)


def num_drafts(engine: Engine) -> tuple[int, int]:
    """Return the numbers of draft tokens and of accepted ones of an engine so far."""
    speculation = engine._scheduler.speculation
    return (0, 0) if speculation is None else (speculation.num_drafts, speculation.num_accepted)


def step(engine: Engine) -> StepOutcome:
    """Take a step; after one without rows, yield the CPU to the threads that load adapters or compile grammars."""
    outcome = engine.step()
    if not outcome.plan.rows:
        time.sleep(0.001)
    return outcome


def finish(engine: Engine) -> list[RequestOutput]:
    """Step until all requests have ended. Checks that no request and no step fails."""
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += step(engine).outputs
    assert [output.error for output in outputs if output.error] == []
    assert engine.num_failed_steps == 0
    engine.kv.pool.check_integrity()
    return outputs


def answers(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], **fields: Any
) -> list[list[int]]:
    """Return the tokens of prompts that run together. params: for all, or one for each. fields: for all requests."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [engine.add_request(prompt, own, **fields) for prompt, own in zip(prompts, each, strict=True)]
    finish(engine)
    return [request.output_token_ids for request in requests]


def prompt_logprobs(engine: Engine, prompts: Sequence[list[int]]) -> Tensor:
    """Return the log-probabilities of the prompts' tokens, one prompt after the other."""
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = sorted(finish(engine), key=lambda output: requests.index(output.request))
    return torch.tensor([entry.logprob for output in outputs for entry in output.prompt_logprobs])


def serve(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[Request]:
    """Return greedy answers of `num_tokens` to prompts that run together; checks that all KV is free afterwards."""
    params = replace(GREEDY, max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    finish(engine)
    assert engine.kv.pool.num_used == 0
    return requests


def directory(path: Path) -> ModelFiles:
    return ModelFiles(path.name, "directory", path)


def make_runner(loaded: LoadedModel, config: EngineConfig) -> CpuRunner:
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    pool = allocate_pool(geometry, loaded.device)
    pool.fill_(float("nan"))  # what was never written must never matter
    return CpuRunner(loaded, pool, None, config)


def plan_of(work: Sequence[tuple[Request, int]]) -> StepPlan:
    """Make the plan that computes the next `n` tokens of each request and samples after the last known one."""
    step = ScheduledStep()
    for request, count in work:
        start = request.num_computed_tokens
        samples = start + count == request.num_tokens
        step.rows[request] = ScheduledRow(request.request_id, start, count, samples)
    step.seal([])
    return step.plan


class Driver:
    """Advances requests step by step. Blocks come in random order; the caller chooses each step's shape."""

    def __init__(self, runner: CpuRunner, config: EngineConfig, seed: int = 0) -> None:
        self.runner = runner
        self.num_groups = len(kv_layout(runner._model.config, runner._pool.dtype).groups)
        self.block_size = config.block_size
        self.free = list(range(config.num_gpu_blocks))
        random.Random(seed).shuffle(self.free)
        self.logits: dict[RequestId, list[Tensor]] = {}
        self.results: list[StepResult] = []
        self._count = 0

    def add(self, prompt: Sequence[int], params: SamplingParams = GREEDY, record_logits: bool = False) -> Request:
        request = Request(RequestId(f"r{self._count}"), list(prompt), params)
        self._count += 1
        if record_logits:
            recorded = self.logits[request.request_id] = []
            self.runner.hooks[request.request_id] = lambda _request, row: recorded.append(row.clone())
        return request

    def step(self, work: Sequence[tuple[Request, int]]) -> StepResult:
        """Compute the next `n` tokens of each request (decode rows first); sample after the last known one."""
        work = sorted(work, key=lambda item: item[1] != 1)
        for request, count in work:
            num_positions = -(-(request.num_computed_tokens + count) // self.block_size)
            while len(request.block_ids) < num_positions * self.num_groups:
                request.block_ids.append(BlockId(self.free.pop()))
        result = self.runner.launch(plan_of(work)).result()
        self.results.append(result)
        for index, (request, count) in enumerate(work):
            request.num_computed_tokens += count
            request.output_token_ids += result.token_ids[index]
        return result

    def finish(self, requests: Sequence[Request], num_tokens: int, chunk: int) -> None:
        """Run all requests to `num_tokens` outputs; prompt chunks join the others' decode steps."""
        while True:
            work = [
                (request, min(chunk, request.num_tokens - request.num_computed_tokens))
                for request in requests
                if len(request.output_token_ids) < num_tokens
            ]
            if not work:
                return
            result = self.step(work)
            assert not result.errors, result.errors


def generate(
    loaded: LoadedModel, config: EngineConfig, prompt: Sequence[int], num_tokens: int = 1, chunk: int = 16
) -> tuple[list[int], Tensor]:
    """Return greedy tokens after a prompt, computed in steps of `chunk`, and their logits (num_tokens, vocab)."""
    driver = Driver(make_runner(loaded, config), config)
    request = driver.add(prompt, record_logits=True)
    driver.finish([request], num_tokens, chunk)
    return request.output_token_ids, torch.stack(driver.logits[request.request_id])


def read_prompt(
    loaded: LoadedModel,
    config: EngineConfig,
    prompt: Sequence[int],
    chunk: int,
    num_likely: int = 0,
    num_tokens: int = 1,
) -> list[TokenLogprobs]:
    """Return log-probabilities of all prompt tokens but the first, in steps of `chunk`; generate `num_tokens`."""
    driver = Driver(make_runner(loaded, config), config)
    driver.finish([driver.add(prompt, replace(GREEDY, prompt_logprobs=num_likely))], num_tokens, chunk)
    return [entry for result in driver.results for part in result.prompt_logprobs for entry in part]


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()

"""Teacher-forced logits: an engine is made to follow given tokens, so that engines can be compared step by step.

One engine answers greedily (`answer`), or a text is taken as the answer; others `follow` it, so that every step
compares equal histories. Users: `forced_logits` (does the fast path compute the same function?), `cpu_accuracy` (does
the size of a step matter?), `quant_agreement` (what does quantization change?).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import drain, greedy
from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.engine import Engine
from engine.kv.memory import allocate_pool, make_kv_manager, pool_geometry
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel
from engine.moe.moe import Moe
from engine.request import TokenLogprobs
from engine.request_states import RequestState
from engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
FORCED_LOGIT = 1e4


@dataclass(frozen=True)
class Answer:
    """A prompt and the tokens that follow it."""

    prompt: list[int]
    token_ids: list[int]


def num_blocks(lengths: Sequence[int], num_output: int, block_size: int = BLOCK_SIZE, num_groups: int = 1) -> int:
    """Return the blocks of sequences that are served together. num_groups: KV groups of the model."""
    return num_groups * sum(-(-(length + num_output) // block_size) + 1 for length in lengths)


def open_plain(loaded: LoadedModel, config: EngineConfig) -> tuple[Engine, CpuRunner]:
    """Make an engine of the plain runner on any device, with its own pool and without a prefix cache."""
    config = replace(config, block_size=BLOCK_SIZE, prefix_cache=False)
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    runner = CpuRunner(loaded, allocate_pool(geometry, loaded.device), None, config)
    scheduler = Scheduler(
        make_kv_manager(geometry, config),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.num_gpu_blocks * BLOCK_SIZE,
    )
    eos_token_ids = frozenset(loaded.config.eos_token_ids)
    return Engine(scheduler, runner, vocab_size=loaded.config.vocab_size, eos_token_ids=eos_token_ids), runner


def answer(engine: Engine, prompts: Sequence[list[int]], num_tokens: int, ignore_eos: bool = True) -> list[Answer]:
    """Answer all prompts greedily."""
    params = replace(greedy(num_tokens), ignore_eos=ignore_eos)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    drain(engine)
    return [Answer(request.prompt_token_ids, request.output_token_ids) for request in requests]


def follow(engine: Engine, runner: Any, answers: Sequence[Answer]) -> list[Tensor]:
    """Return the float32 logits (tokens, vocab) before each token of the answers, on the CPU.

    runner: the engine's, for its hooks. All answers are served together, as far as the engine's limits allow.
    """
    seen: list[list[Tensor]] = [[] for _ in answers]
    for rows, each in zip(seen, answers, strict=True):
        request = engine.add_request(each.prompt, greedy(len(each.token_ids)))

        def force(
            request: RequestState, row: Tensor, rows: list[Tensor] = rows, token_ids: list[int] = each.token_ids
        ) -> None:
            rows.append(row.float().cpu().clone())
            row[token_ids[len(request.output_token_ids)]] = FORCED_LOGIT

        runner.hooks[request.request_id] = force
    drain(engine)
    runner.hooks.clear()
    return [torch.stack(rows) for rows in seen]


def read(engine: Engine, answers: Sequence[Answer], num_likely: int = 1) -> list[list[TokenLogprobs]]:
    """Return the log-probabilities of each prompt and answer, read as one prompt, without the first token.

    They include the likeliest tokens of each position. Faster than `follow` where a step costs more than its rows.
    """
    params = replace(greedy(1), prompt_logprobs=num_likely)
    requests = [engine.add_request([*each.prompt, *each.token_ids], params) for each in answers]
    outputs = drain(engine)
    return [[entry for out in outputs if out.request is each for entry in out.prompt_logprobs] for each in requests]


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """Convert the model in place: the same numbers, held and multiplied in float32."""
    model = loaded.model
    model.embedding = model.embedding.float()
    model.final_norm, model.rotary = model.final_norm.float(), model.rotary.float()
    model.local_rotary, model.embedding_scale = as_float32(model.local_rotary), as_float32(model.embedding_scale)
    model.hidden_dtype = torch.float32
    for ref in model.linears():
        linear: Any = ref.layer  # plain, or int8 with its weight dequantized
        ref.replace(Linear(linear.weight.float(), None if linear.bias is None else linear.bias.float()))
    for each in model.blocks:
        block = each.inner
        each.norm = block.norm = block.norm.float()
        if isinstance(block, Attention):
            block.qk_norm, block.sinks = as_float32(block.qk_norm), as_float32(block.sinks)
        if isinstance(block, Moe):
            block.router, block.router_bias = block.router.float(), as_float32(block.router_bias)
    return replace(loaded, dtype=torch.float32)


def as_float32(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float()


def relative_errors(expected: Tensor, found: Tensor) -> list[float]:
    """Return the norm of the difference over the norm of the reference, for each token."""
    errors: list[float] = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    return errors


def compare(expected: Sequence[Tensor], found: Sequence[Tensor]) -> dict[str, Any]:
    """Return the errors of logits, and how often another token is the likeliest.

    A tie: in the reference, both tokens are within the size of the error.
    """
    errors: list[float] = []
    num_different = num_ties = 0
    for reference, logits in zip(expected, found, strict=True):
        errors += relative_errors(reference, logits)
        best, own = reference.argmax(-1, keepdim=True), logits.argmax(-1, keepdim=True)
        gap = reference.gather(1, best) - reference.gather(1, own)
        is_tie = gap <= 2 * (logits - reference).abs().amax(dim=-1, keepdim=True)
        num_different += int((best != own).sum())
        num_ties += int(((best != own) & is_tie).sum())
    return {
        "tokens": len(errors),
        "relative_error_max": round(max(errors), 5),
        "relative_error_mean": round(sum(errors) / len(errors), 5),
        "other_tokens": num_different,
        "of_these_ties": num_ties,
    }

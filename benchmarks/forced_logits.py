"""Whether the fast path computes the same function: its logits beside a plain float32 pass, step by step.

    python -m benchmarks.forced_logits --model benchmarks/configs/qwen2.5-7b --load-format dummy

The reference is the same weights in float32, plain torch attention over the pool, one prompt after the other. It
chooses greedy tokens; the engine under test, with its own batches, chunks, graphs and overlap, is made to follow
them, so that every step compares equal histories. Shown: the largest relative error of a step's logits (norm of the
difference over norm of the reference), and how often the engine's own greedy token differs, with the share of those
that are real ties: the reference ranks both tokens within the size of the error. All engine flags are taken,
`--quant-mode` too.

To tell where a wrong token comes from, the reference is computed again with its prompts in small chunks:
`chunked_reference_error_max` says how far that is from the first. And the worst token's logits are compared with all
others of the reference and with those after each prompt's first tokens, which names a row that was mixed up.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.config import add_arguments, from_namespace
from common.errors import ConfigError
from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.config import GpuConfig
from engine.kv_manager import KVManager
from engine.kv_memory import allocate_pool, pool_geometry
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel, load_model, resolve_device
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.sampler import LogitsHook
from engine.scheduler import Scheduler
from kvstore.block_pool import BlockPool

BLOCK_SIZE = 16  # of the reference
WHOLE, CHUNK = 2048, 48  # tokens in one step of the reference, and of its second pass
PREFIXES = (1, 2, 4, 16)  # tokens of a prompt whose logits the worst row is compared with


@dataclass(frozen=True)
class Trace:
    """One prompt's greedy tokens and the logits before each, float32 (tokens, vocab) on the CPU."""

    token_ids: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Reference:
    """traces: one of each prompt. chunked: their logits by the second pass. prefixes: logits (vocab,) by name."""

    prompts: list[list[int]]
    traces: list[Trace]
    chunked: list[Tensor]
    prefixes: dict[str, Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Logits of the engine beside a float32 reference.")
    add_arguments(parser, EngineConfig)
    add_arguments(parser, GpuConfig)
    parser.add_argument("--prompts", default="7,64,65,300,511,1030", help="prompt lengths, served together")
    parser.add_argument("--output", type=int, default=24, help="tokens compared per prompt")
    options = parser.parse_args(argv)
    lengths = [int(part) for part in options.prompts.split(",")]
    config = from_namespace(EngineConfig, options)
    try:
        config = config.resolved(resolve_device(config).type)
        blocks = sum(-(-(length + options.output) // config.block_size) + 1 for length in lengths)
        config = replace(config, num_gpu_blocks=blocks, max_num_seqs=len(lengths))
        # The reference first: its weights are gone when the engine under test is loaded.
        reference = compute_reference(config, lengths, options.output)
        parts = assemble(config, gpu=from_namespace(GpuConfig, options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    forced = follow(parts.engine, parts.runner, reference.prompts, reference.traces)
    figures = {"model": parts.files.name, "quant_mode": parts.quantization, **compare(reference.traces, forced)}
    figures["chunked_reference_error_max"] = compare(reference.traces, reference.chunked)["relative_error_max"]
    print(json.dumps(figures))
    for length, trace, logits in zip(lengths, reference.traces, forced, strict=True):
        errors = relative_errors(trace, logits)
        print(f"prompt of {length}:", " ".join(f"{error:.4f}" for error in errors), file=sys.stderr)
    print(describe_worst(reference, forced), file=sys.stderr)
    return 0


def compute_reference(config: EngineConfig, lengths: list[int], num_output: int) -> Reference:
    """Greedy traces by the plain runner on the same device, one request at a time."""
    device = resolve_device(config)
    plain = replace(config, quant_mode="none", block_size=BLOCK_SIZE, max_num_seqs=1)
    loaded = in_float32(load_model(resolve_model(config.model), plain, device))
    plain = replace(plain, num_gpu_blocks=-(-(max(lengths) + num_output) // BLOCK_SIZE) + 1)
    draw = random.Random(1)
    prompts = [[draw.randrange(loaded.config.vocab_size) for _ in range(length)] for length in lengths]
    engine, runner = open_plain(loaded, replace(plain, max_num_batched_tokens=WHOLE))
    traces = [trace_of(engine, runner, prompt, num_output) for prompt in prompts]
    prefixes = {
        f"first {count} of {len(prompt)}": trace_of(engine, runner, prompt[:count], 1).logits[0]
        for prompt in prompts
        for count in (*PREFIXES, len(prompt) - 1)
        if 0 < count < len(prompt)
    }
    chunked = follow(*open_plain(loaded, replace(plain, max_num_batched_tokens=CHUNK)), prompts, traces)
    return Reference(prompts, traces, chunked, prefixes)


def open_plain(loaded: LoadedModel, config: EngineConfig) -> tuple[Engine, ModelRunner]:
    """An engine of the plain runner with a pool of its own."""
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    runner = ModelRunner(loaded, allocate_pool(geometry, loaded.device), None, config)
    num_blocks = config.num_gpu_blocks
    scheduler = Scheduler(
        KVManager(BlockPool(num_blocks, False), BLOCK_SIZE, loaded.fingerprint, None, False),
        max_num_seqs=1,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=num_blocks * BLOCK_SIZE,
        preempt_by_swap=False,
    )
    return Engine(scheduler, runner, vocab_size=loaded.config.vocab_size, eos_token_ids=frozenset()), runner


def trace_of(engine: Engine, runner: ModelRunner, prompt: list[int], num_output: int) -> Trace:
    rows: list[Tensor] = []
    request = engine.add_request(prompt, greedy(num_output))
    runner.hooks[request.request_id] = recorder(rows)
    run(engine)
    return Trace(request.output_token_ids, torch.stack(rows))


def recorder(rows: list[Tensor]) -> LogitsHook:
    def record(_: Request, row: Tensor) -> None:
        rows.append(row.float().cpu().clone())  # the row may be changed in place after this

    return record


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """The same numbers, held and multiplied in float32."""
    model = loaded.model
    maps: dict[int, Linear] = {}

    def convert(linear: Any) -> Linear:
        wide = Linear(linear.weight.float(), None if linear.bias is None else linear.bias.float(), linear.names)
        return maps.setdefault(id(linear), wide)

    model.embedding = model.embedding.float()
    model.final_norm, model.rotary = model.final_norm.float(), model.rotary.float()
    model.lm_head = convert(model.lm_head)
    for layer in model.layers:
        layer.qkv, layer.attention_output = convert(layer.qkv), convert(layer.attention_output)
        layer.gate_up, layer.down = convert(layer.gate_up), convert(layer.down)
        layer.attention_norm, layer.mlp_norm = layer.attention_norm.float(), layer.mlp_norm.float()
        layer.qk_norm = None if layer.qk_norm is None else layer.qk_norm.float()
    return replace(loaded, dtype=torch.float32)


def follow(engine: Engine, runner: Any, prompts: list[list[int]], traces: list[Trace]) -> list[Tensor]:
    """Logits of an engine while it is made to choose the tokens of `traces`. runner: the engine's, for its hooks."""
    seen: list[list[Tensor]] = [[] for _ in prompts]
    for index, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        request = engine.add_request(prompt, greedy(len(trace.token_ids)))

        def force(request: Request, row: Tensor, index: int = index) -> None:
            seen[index].append(row.float().cpu().clone())
            row[traces[index].token_ids[len(request.output_token_ids)]] = 1e4

        runner.hooks[request.request_id] = force
    run(engine)
    return [torch.stack(rows) for rows in seen]


def relative_errors(trace: Trace, logits: Tensor) -> list[float]:
    """Of each token: norm of the difference over norm of the reference."""
    errors: list[float] = ((logits - trace.logits).norm(dim=-1) / trace.logits.norm(dim=-1)).tolist()
    return errors


def describe_worst(reference: Reference, forced: list[Tensor]) -> str:
    """The token of the largest error, and the reference's rows that its logits are most like."""
    errors = [relative_errors(trace, logits) for trace, logits in zip(reference.traces, forced, strict=True)]
    place = max(range(len(errors)), key=lambda index: max(errors[index]))
    step = errors[place].index(max(errors[place]))
    row, expected = forced[place][step], reference.traces[place].logits[step]
    named = dict(reference.prefixes)
    for prompt, trace in zip(reference.prompts, reference.traces, strict=True):
        named |= {f"output {index} after {len(prompt)}": logits for index, logits in enumerate(trace.logits)}
    likeness = {name: float(torch.cosine_similarity(row, other, dim=0)) for name, other in named.items()}
    nearest = sorted(likeness, key=lambda name: -likeness[name])[:3]
    return (
        f"worst: output {step} after {len(reference.prompts[place])}, error {errors[place][step]:.4f}, "
        f"norm over the reference's {float(row.norm() / expected.norm()):.3f}, cosine with its own row "
        f"{float(torch.cosine_similarity(row, expected, dim=0)):.3f}; "
        f"nearest: {', '.join(f'{name} {likeness[name]:.3f}' for name in nearest)}"
    )


def compare(reference: list[Trace], forced: list[Tensor]) -> dict[str, Any]:
    errors: list[float] = []
    num_different = num_ties = num_tokens = 0
    for trace, logits in zip(reference, forced, strict=True):
        errors += relative_errors(trace, logits)
        difference = logits - trace.logits
        best, own = trace.logits.argmax(-1), logits.argmax(-1)
        rows = torch.arange(len(best))
        gap = trace.logits[rows, best] - trace.logits[rows, own]
        num_tokens += len(best)
        num_different += int((best != own).sum())
        num_ties += int(((best != own) & (gap <= 2 * difference.abs().amax(dim=-1))).sum())
    return {
        "tokens": num_tokens,
        "relative_error_max": round(max(errors), 5),
        "relative_error_mean": round(sum(errors) / len(errors), 5),
        "other_tokens": num_different,
        "of_these_ties": num_ties,
    }


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def run(engine: Engine) -> None:
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)


if __name__ == "__main__":
    sys.exit(main())

"""Whether the fast path computes the same function: its logits beside a plain float32 pass, step by step.

    python -m benchmarks.forced_logits --model benchmarks/configs/qwen2.5-7b --load-format dummy

The reference is the same weights in float32, plain torch attention over the pool, one prompt after the other. It
chooses greedy tokens; the engine under test, with its own batches, chunks, graphs and overlap, is made to follow
them, so that every step compares equal histories. Shown: the largest relative error of a step's logits (norm of the
difference over norm of the reference), and how often the engine's own greedy token differs, with the share of those
that are real ties: the reference ranks both tokens within the size of the error. All engine flags are taken,
`--quant-mode` too.

Two more passes say what to expect. `bfloat16_error_*` is plain torch in the model's own dtype: what rounding alone
does to these weights. `chunked_reference_error_max` is the float32 pass again with its prompts in small chunks: above
1e-3 the reference is at fault, not the engine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import add_arguments, from_namespace
from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from common.text.tokenizer import load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.cpu.runner import ModelRunner
from engine.engine import Engine
from engine.gpu.config import GpuConfig
from engine.kv_manager import KVManager
from engine.kv_memory import allocate_pool, pool_geometry
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel, load_model, resolve_device
from engine.request import SamplingParams
from engine.request_states import RequestState
from engine.sampler import LogitsHook
from engine.scheduler import Scheduler
from kvstore.pool.block_pool import BlockPool

BLOCK_SIZE = 16  # of the reference
WHOLE, CHUNK = 2048, 48  # tokens in one step of the reference, and of its second pass


@dataclass(frozen=True)
class Trace:
    """One prompt's greedy tokens and the logits before each, float32 (tokens, vocab) on the CPU."""

    token_ids: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Reference:
    """traces: one of each prompt, float32. chunked, rounded: logits of the same tokens by the other two passes."""

    prompts: list[list[int]]
    traces: list[Trace]
    chunked: list[Tensor]
    rounded: list[Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Logits of the engine beside a float32 reference.")
    add_arguments(parser, EngineConfig)
    add_arguments(parser, GpuConfig)
    parser.add_argument("--prompts", default="7,64,65,300,511,1030", help="prompt lengths, served together")
    parser.add_argument(
        "--text", default="", help="file that prompts are pieces of; without it they are random tokens"
    )
    parser.add_argument("--output", type=int, default=24, help="tokens compared per prompt")
    options = parser.parse_args(argv)
    lengths = [int(part) for part in options.prompts.split(",")]
    config = from_namespace(EngineConfig, options)
    try:
        config = config_for(config, lengths, options.output)
        # The reference first: its weights are gone when the engine under test is loaded.
        text = Path(options.text).read_text() if options.text else ""
        reference = compute_reference(config, lengths, options.output, text)
        parts = assemble(config, gpu=from_namespace(GpuConfig, options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    forced = follow(parts.engine, parts.runner, reference.prompts, reference.traces)
    figures = {"model": parts.files.name, "quant_mode": parts.quantization, **compare(reference.traces, forced)}
    for kind in ("mean", "max"):
        figures[f"bfloat16_error_{kind}"] = compare(reference.traces, reference.rounded)[f"relative_error_{kind}"]
    figures["chunked_reference_error_max"] = compare(reference.traces, reference.chunked)["relative_error_max"]
    print(json.dumps(figures))
    for length, trace, logits in zip(lengths, reference.traces, forced, strict=True):
        errors = relative_errors(trace, logits)
        print(f"prompt of {length}:", " ".join(f"{error:.4f}" for error in errors), file=sys.stderr)
    return 0


def config_for(config: EngineConfig, lengths: Sequence[int], num_output: int) -> EngineConfig:
    """All prompts beside each other, with just the blocks that they need. Raises ConfigError."""
    config = config.resolved(resolve_device(config).type)
    blocks = sum(-(-(length + num_output) // config.block_size) + 1 for length in lengths)
    return replace(config, num_gpu_blocks=blocks, max_num_seqs=len(lengths))


def compute_reference(config: EngineConfig, lengths: Sequence[int], num_output: int, text: str = "") -> Reference:
    """Greedy traces by the plain runner on the same device, one request at a time. Raises ConfigError."""
    plain = replace(config, quant_mode="none", block_size=BLOCK_SIZE, max_num_seqs=1)
    files = resolve_model(config.model)
    loaded = in_float32(load_model(files, plain, resolve_device(config)))
    prompts = pieces_of(files, text, lengths) if text else random_prompts(loaded.config.vocab_size, lengths)
    plain = replace(plain, num_gpu_blocks=-(-(max(lengths) + num_output) // BLOCK_SIZE) + 1)
    engine, runner = open_plain(loaded, replace(plain, max_num_batched_tokens=WHOLE))
    traces = [trace_of(engine, runner, prompt, num_output) for prompt in prompts]
    chunked = follow(*open_plain(loaded, replace(plain, max_num_batched_tokens=CHUNK)), prompts, traces)
    loaded = load_model(files, plain, loaded.device)  # float32 has taken the place of the first one's weights
    rounded = follow(*open_plain(loaded, replace(plain, max_num_batched_tokens=WHOLE)), prompts, traces)
    return Reference(prompts, traces, chunked, rounded)


def random_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def pieces_of(files: ModelFiles, text: str, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of pieces of `text`, one behind the other. Raises ConfigError when it is too short."""
    token_ids = load_tokenizer(files).encode(text)
    if len(token_ids) < sum(lengths):
        raise ConfigError(f"the text has {len(token_ids)} tokens, the prompts need {sum(lengths)}")
    return [token_ids[stop - length : stop] for length, stop in zip(lengths, accumulate(lengths), strict=True)]


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
    def record(_: RequestState, row: Tensor) -> None:
        rows.append(row.float().cpu().clone())  # the row may be changed in place after this

    return record


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """The same numbers, held and multiplied in float32."""
    model = loaded.model
    model.embedding = model.embedding.float()
    model.final_norm, model.rotary = model.final_norm.float(), model.rotary.float()
    for ref in model.linears():
        linear: Any = ref.layer  # plain, or int8 with its weight computed anew
        ref.replace(Linear(linear.weight.float(), None if linear.bias is None else linear.bias.float()))
    for block in model.blocks:
        block.norm = block.norm.float()
        if isinstance(block, Attention) and block.qk_norm is not None:
            block.qk_norm = block.qk_norm.float()
    return replace(loaded, dtype=torch.float32)


def follow(engine: Engine, runner: Any, prompts: list[list[int]], traces: list[Trace]) -> list[Tensor]:
    """Logits of an engine while it is made to choose the tokens of `traces`. runner: the engine's, for its hooks."""
    seen: list[list[Tensor]] = [[] for _ in prompts]
    for index, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        request = engine.add_request(prompt, greedy(len(trace.token_ids)))

        def force(request: RequestState, row: Tensor, index: int = index) -> None:
            seen[index].append(row.float().cpu().clone())
            row[traces[index].token_ids[request.num_output_tokens]] = 1e4

        runner.hooks[request.request_id] = force
    run(engine)
    return [torch.stack(rows) for rows in seen]


def relative_errors(trace: Trace, logits: Tensor) -> list[float]:
    """Of each token: norm of the difference over norm of the reference."""
    errors: list[float] = ((logits - trace.logits).norm(dim=-1) / trace.logits.norm(dim=-1)).tolist()
    return errors


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

"""Accuracy of the fast path: its logits beside a plain float32 pass, step by step.

    python -m benchmarks.accuracy.forced_logits --model benchmarks/configs/qwen2.5-7b --load-format dummy

The reference is the same weights in float32, plain torch attention over the pool, one prompt after the other. It
chooses greedy tokens; the engine under test, with its own batches, chunks, graphs and overlap, is made to follow
them, so that every step compares equal histories. Shown: the largest relative error of a step's logits (norm of the
difference over norm of the reference), and how often the engine's own greedy token differs, with the share of those
that are real ties: the reference ranks both tokens within the size of the error. All engine flags are taken,
`--quant-mode` too.

Two more passes say what to expect. `bfloat16_error_*` is plain torch in the model's own dtype: what its rounding
alone does to these weights. `chunked_reference_error_max` is the float32 pass again with its prompts in small
chunks: above 1e-3 the reference is at fault, not the engine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.accuracy.agreement import (
    Answer,
    answer,
    compare,
    follow,
    in_float32,
    num_blocks,
    open_plain,
    relative_errors,
)
from benchmarks.harness import int_list, random_prompt, report
from common.config import add_arguments, from_namespace
from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from common.text.load import load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.kv.memory import kv_layout
from engine.loader.load import load_model, read_config, resolve_device

WHOLE, CHUNK = 2048, 48  # tokens per step in the reference, and in its second pass


@dataclass(frozen=True)
class Reference:
    """Answers, and float32 logits of their tokens from three passes of the plain runner.

    logits: in float32, the reference. chunked: the same with prompts in small chunks. bfloat16: in the model's dtype.
    """

    answers: list[Answer]
    logits: list[Tensor]
    chunked: list[Tensor]
    bfloat16: list[Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Logits of the engine beside a float32 reference.")
    add_arguments(parser, EngineConfig)
    add_arguments(parser, GpuConfig)
    parser.add_argument(
        "--prompts", type=int_list, default="7,64,65,300,511,1030", help="prompt lengths, served together"
    )
    parser.add_argument(
        "--text", default="", help="file that prompts are pieces of; without it they are random tokens"
    )
    parser.add_argument("--output", type=int, default=24, help="tokens compared per prompt")
    options = parser.parse_args(argv)
    lengths = options.prompts
    config = from_namespace(EngineConfig, options)
    try:
        config = config_for(config, lengths, options.output)
        # The reference comes first: its weights are freed before the engine under test is loaded.
        text = Path(options.text).read_text() if options.text else ""
        reference = compute_reference(config, lengths, options.output, text)
        parts = assemble(config, gpu=from_namespace(GpuConfig, options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    forced = follow(parts.engine, parts.runner, reference.answers)
    figures = {"model": parts.files.name, "quant_mode": parts.loaded.quant_mode, **compare(reference.logits, forced)}
    for kind in ("mean", "max"):
        figures[f"bfloat16_error_{kind}"] = compare(reference.logits, reference.bfloat16)[f"relative_error_{kind}"]
    figures["chunked_reference_error_max"] = compare(reference.logits, reference.chunked)["relative_error_max"]
    report(figures)
    for length, expected, logits in zip(lengths, reference.logits, forced, strict=True):
        errors = relative_errors(expected, logits)
        print(f"prompt of {length}:", " ".join(f"{error:.4f}" for error in errors), file=sys.stderr)
    return 0


def config_for(config: EngineConfig, lengths: Sequence[int], num_output: int) -> EngineConfig:
    """Return settings that serve all prompts together, with just the blocks they need. Raises ConfigError."""
    config = config.resolved(resolve_device(config).type)
    blocks = num_blocks(lengths, num_output, config.block_size, num_groups_of(config))
    return replace(config, num_gpu_blocks=blocks, max_num_seqs=len(lengths))


def num_groups_of(config: EngineConfig) -> int:
    """Return the number of KV groups of the model. Raises ConfigError."""
    return len(kv_layout(read_config(resolve_model(config.model), config), torch.bfloat16).groups)


def compute_reference(config: EngineConfig, lengths: Sequence[int], num_output: int, text: str = "") -> Reference:
    """Answer greedily with the plain runner on the same device, one request at a time. Raises ConfigError."""
    blocks = num_blocks([max(lengths)], num_output, num_groups=num_groups_of(config))
    whole = replace(config, quant_mode="none", num_gpu_blocks=blocks, max_num_seqs=1, max_num_batched_tokens=WHOLE)
    files = resolve_model(config.model)
    loaded = in_float32(load_model(files, whole, resolve_device(config)))
    rng, vocab_size = random.Random(1), loaded.config.vocab_size
    prompts = pieces_of(files, text, lengths) if text else [random_prompt(rng, vocab_size, n) for n in lengths]
    engine, runner = open_plain(loaded, whole)
    answers = answer(engine, prompts, num_output)
    logits = follow(engine, runner, answers)
    chunked = follow(*open_plain(loaded, replace(whole, max_num_batched_tokens=CHUNK)), answers)
    loaded = load_model(files, whole, loaded.device)  # float32 has replaced the first one's weights
    bfloat16 = follow(*open_plain(loaded, whole), answers)
    return Reference(answers, logits, chunked, bfloat16)


def pieces_of(files: ModelFiles, text: str, lengths: Sequence[int]) -> list[list[int]]:
    """Return token ids of consecutive pieces of `text`. Raises ConfigError if it is too short."""
    token_ids = load_tokenizer(files).encode(text)
    if len(token_ids) < sum(lengths):
        raise ConfigError(f"the text has {len(token_ids)} tokens, the prompts need {sum(lengths)}")
    return [token_ids[stop - length : stop] for length, stop in zip(lengths, accumulate(lengths), strict=True)]


if __name__ == "__main__":
    sys.exit(main())

"""Decode speed on a GPU compared with transformers' `generate`, in one run with the same shapes and random weights.

    python -m benchmarks.comparisons.compare_gpu --model benchmarks/configs/qwen2.5-7b --batch 1,8

Both get new prompts of `--input` tokens and generate `--output` tokens greedily in the same dtype. Only decoding is
compared: the time of the same call with one output token is subtracted from each side's total.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness import drain, greedy, int_list, random_prompt, transformers_generate
from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig

REPEATS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Our decode speed beside transformers' generate on one GPU.")
    parser.add_argument("--model", required=True, help="directory with a config.json; weights are random")
    parser.add_argument("--batch", type=int_list, default="1,8")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: this comparison needs a CUDA GPU; on a CPU use benchmarks.comparisons.compare_cpu",
            file=sys.stderr,
        )
        return 2
    try:
        ours = measure_ours(options.model, options.batch, options.input, options.output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gc.collect()
    torch.cuda.empty_cache()
    theirs = measure_transformers(options.model, options.batch, options.input, options.output)
    print(f"{'batch':>5} {'mini-infer':>12} {'transformers':>13} {'ratio':>7}   (output tok/s)")
    for batch in options.batch:
        print(f"{batch:5} {ours[batch]:12.1f} {theirs[batch]:13.1f} {ours[batch] / theirs[batch]:6.1f}x")
    return 0


def decode_speed(generate: Callable[[list[list[int]], int], None], vocab_size: int, batch: int, num_input: int,
                 num_output: int) -> float:  # fmt: skip
    """Return the output tok/s of decoding: the best of a few runs, each with new prompts."""
    rng = random.Random()

    def seconds(count: int) -> float:
        prompts = [random_prompt(rng, vocab_size, num_input) for _ in range(batch)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate(prompts, count)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    first = min(seconds(1) for _ in range(REPEATS))
    whole = min(seconds(num_output) for _ in range(REPEATS))
    return batch * (num_output - 1) / (whole - first)


def measure_ours(model: str, batches: list[int], num_input: int, num_output: int) -> dict[int, float]:
    dummy: dict[str, Any] = {"load_format": "dummy"}
    config = EngineConfig(model=model, device="cuda", prefix_cache=False, **dummy)
    config = config.resolved("cuda")
    blocks = max(batches) * (-(-(num_input + num_output) // config.block_size) + 1)
    parts = assemble(replace(config, max_num_seqs=max(batches), num_gpu_blocks=blocks))
    engine = parts.engine

    def generate(prompts: list[list[int]], count: int) -> None:
        for prompt in prompts:
            engine.add_request(prompt, greedy(count))
        drain(engine)

    vocab_size = parts.loaded.config.vocab_size
    return {batch: decode_speed(generate, vocab_size, batch, num_input, num_output) for batch in batches}


def measure_transformers(path: str, batches: list[int], num_input: int, num_output: int) -> dict[int, float]:
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(path)
    from_config: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("cuda"):
        model = from_config(config, torch_dtype=torch.bfloat16)
    model.eval()

    generate = partial(transformers_generate, model)
    return {batch: decode_speed(generate, config.vocab_size, batch, num_input, num_output) for batch in batches}


if __name__ == "__main__":
    sys.exit(main())

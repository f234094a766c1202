"""Speed of vLLM's `LLM` in the shapes of `benchmarks.engine`, as the same JSON lines. Needs nothing but vLLM.

    python benchmarks/comparisons/vllm_engine.py --model benchmarks/configs/qwen2.5-7b --batch 1,8,64 --prefill 8192

Run by `benchmarks.comparisons.compare_vllm`. Weights are random; with those, a router of experts sends nearly all
tokens to a few of them, so here tokens go to random experts (VLLM_MOE_ROUTING_SIMULATION_STRATEGY). Speeds are those
of decoding: from a batch's time that of the same prompts with one output token is taken off. The best of a few, each
with new prompts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

REPEATS = 3
HEADROOM = 8  # tokens of a sequence in addition to prompt and answer


def main() -> None:
    options = parse()
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    vllm: Any = importlib.import_module("vllm")  # imported here, because it reads the environment

    longest = max([options.input + options.output if options.batch else 0, *options.prefill])
    settings: dict[str, Any] = {} if options.quant_mode == "none" else {"quantization": options.quant_mode}
    llm = vllm.LLM(
        model=options.model, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, seed=0,
        max_model_len=longest + HEADROOM, max_num_seqs=max([*options.batch, 1]), enable_prefix_caching=False,
        tensor_parallel_size=options.tp, **settings,
    )  # fmt: skip
    raw = json.loads(Path(options.model, "config.json").read_text(encoding="utf-8"))
    vocab_size = raw.get("vocab_size") or raw["text_config"]["vocab_size"]

    def seconds(num_rows: int, num_input: int, num_output: int) -> float:
        """Return the best time of a few runs for `num_rows` prompts at once."""
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        times = []
        for _ in range(1 + REPEATS):  # the first one warms up
            prompts = [
                {"prompt_token_ids": [random.randrange(vocab_size) for _ in range(num_input)]}
                for _ in range(num_rows)
            ]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - began)
        return min(times[1:])

    for batch in options.batch:
        first = seconds(batch, options.input, 1)
        decoding = seconds(batch, options.input, options.output) - first
        report(batch=batch, tok_s=round(batch * (options.output - 1) / decoding, 1), prefill_s=round(first, 4))
    for num_tokens in options.prefill:
        report(prefill=num_tokens, prefill_s=round(seconds(1, num_tokens, 1), 4))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of vLLM with random weights.")
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--quant-mode", default="none", help="none, or what vLLM calls `quantization`")
    parser.add_argument("--batch", type=int_list, default=[])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prefill", type=int_list, default=[], help="single prompts of these lengths")
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args()


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def report(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

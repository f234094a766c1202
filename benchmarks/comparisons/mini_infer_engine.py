"""Speed of mini-infer's engine, measured as `vllm_engine.py` measures vLLM's: for `compare_vllm`.

    python -m benchmarks.comparisons.mini_infer_engine --model DIR --load-format dummy --batch 1,64 --prefill 8192

Flags are those of `benchmarks.engine`, which measures the steps between the last first token and the last token. Here
a batch's prompts run with one output token and with all of them, and the difference is decoding: in the first run no
step has decode rows. The best of --rounds, after one more, each with new prompts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engine import Bench, identity, opened, prefill_figures, prompt_lengths
from benchmarks.harness import drain, report


def main(argv: Sequence[str] | None = None) -> int:
    options, bench = opened(argv)
    for batch in options.batch:
        report(batch_figures(bench, prompt_lengths(options, batch), options.output, options.rounds), True)
    for num_tokens in options.prefill:
        report(prefill_figures(bench, num_tokens), True)
    return 0


def batch_figures(bench: Bench, lengths: Sequence[int], num_output: int, rounds: int) -> dict[str, Any]:
    first = seconds(bench, lengths, 1, rounds)
    decoding = seconds(bench, lengths, num_output, rounds) - first
    return {
        **identity(bench),
        "batch": len(lengths),
        "tok_s": round(len(lengths) * (num_output - 1) / decoding, 1),
        "prefill_s": round(first, 4),
    }


def seconds(bench: Bench, lengths: Sequence[int], num_output: int, rounds: int) -> float:
    """Return the best time of a few runs for all prompts at once."""
    times = []
    for _ in range(1 + rounds):  # the first one warms up
        for num_tokens in lengths:
            bench.add(num_tokens, num_output)
        began = time.perf_counter()
        drain(bench.parts.engine)
        times.append(time.perf_counter() - began)
    return min(times[1:])


if __name__ == "__main__":
    sys.exit(main())

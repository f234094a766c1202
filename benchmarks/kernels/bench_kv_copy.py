"""kv_copy: bandwidth against a plain copy, with and without digests, and time against eager torch."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.timing import copy_bandwidth, graph_seconds, num_input_sets, report, report_against_copy
from kernels.gpu.kv_copies import kv_copy
from kernels.kv_copies import kv_copy as reference
from kvstore.pool.digest import digest_weights

ON_GPU = kv_copy.copy_blocks, kv_copy.digest_blocks
REFERENCE = reference.copy_blocks, reference.digest_blocks
BLOCK_BYTES = {"qwen2.5-7b": 917_504, "smollm2-135m": 368_640}  # 16 tokens, bfloat16
CASES = (("qwen2.5-7b", 1), ("qwen2.5-7b", 64), ("qwen2.5-7b", 512), ("smollm2-135m", 64))


class Case:
    """Random blocks, and lists of `num_ids` of them to copy, which are the rotating input sets."""

    def __init__(self, block_bytes: int, num_ids: int) -> None:
        self.num_bytes = num_ids * block_bytes
        num_sets, num_words = num_input_sets(2 * self.num_bytes, 16), block_bytes // 8
        num_blocks = num_sets * num_ids
        self.source = torch.randint(-(2**62), 2**62, (num_blocks, num_words), device="cuda")
        self.target = torch.empty_like(self.source)
        self.weights = torch.stack([torch.from_numpy(w) for w in digest_weights(num_words)]).cuda()
        orders = [torch.randperm(num_blocks, device="cuda").int().view(num_sets, num_ids) for _ in range(2)]
        self.pairs = list(zip(*orders, strict=True))

    def calls(self, copies: bool, digests: bool, functions: Any = ON_GPU) -> list[Callable[[], object]]:
        """Return one call per set. functions: one that copies, and one that only computes digests."""
        copy_blocks, digest_blocks = functions
        if not copies:
            return [functools.partial(digest_blocks, self.source, a, self.weights) for a, _ in self.pairs]
        weights = self.weights if digests else None
        return [functools.partial(copy_blocks, self.source, a, self.target, b, weights) for a, b in self.pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    copy = copy_bandwidth()
    for model, num_ids in CASES:
        case = Case(BLOCK_BYTES[model], num_ids)
        if options.sweep:
            sweep(case, f"{model} {num_ids}", copy)
            continue
        for name, copies, digests in (("copy", True, False), ("copy+digest", True, True), ("digest", False, True)):
            moved, eager = (1 + copies) * case.num_bytes, case.calls(copies, digests, REFERENCE)[:2]
            shape = f"{model} {num_ids} blocks"
            report_against_copy(f"kv_copy {name}", shape, case.calls(copies, digests), eager, moved, copy)


def sweep(case: Case, shape: str, copy: float) -> None:
    for words, blocks, warps in itertools.product((512, 1024, 2048), (1, 4, 8, 16), (4, 8)):
        kv_copy.WORDS, kv_copy.BLOCKS, kv_copy.NUM_WARPS = words, blocks, warps
        seconds = graph_seconds(case.calls(True, True))
        rate = 2 * case.num_bytes / seconds
        report("kv_copy sweep", f"{shape} w{words} b{blocks} n{warps}", us=seconds * 1e6, of_copy=rate / copy)


if __name__ == "__main__":
    main()

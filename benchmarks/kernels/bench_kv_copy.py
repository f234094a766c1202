"""kv_copy: bandwidth against a plain copy, with and without digests, and time against eager torch."""

from __future__ import annotations

import argparse
import functools
import itertools

import torch
from torch import Tensor

from benchmarks.kernels.timing import copy_bandwidth, graph_seconds, num_input_sets, report, report_against_copy
from kernels import kv_copy as reference
from kernels.gpu import kv_copy
from kvstore.pool.digest import digest_weights

BLOCK_BYTES = {"qwen2.5-7b": 917_504, "smollm2-135m": 368_640}  # 16 tokens, bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    copy = copy_bandwidth()
    for model, num_ids in (("qwen2.5-7b", 1), ("qwen2.5-7b", 64), ("qwen2.5-7b", 512), ("smollm2-135m", 64)):
        num_words = BLOCK_BYTES[model] // 8
        num_sets = num_input_sets(2 * num_ids * BLOCK_BYTES[model], 16)
        num_blocks = num_sets * num_ids
        source = torch.randint(-(2**62), 2**62, (num_blocks, num_words), device="cuda")
        target = torch.empty_like(source)
        weights = torch.stack([torch.from_numpy(w) for w in digest_weights(num_words)]).cuda()
        orders = [torch.randperm(num_blocks, device="cuda").int().view(num_sets, num_ids) for _ in range(2)]
        pairs = list(zip(*orders, strict=True))

        def calls(
            copies: bool, digests: bool, module=kv_copy, pairs=pairs, source=source, target=target, weights=weights
        ):  # fmt: skip
            if not copies:
                return [functools.partial(module.digest_blocks, source, a, weights) for a, _ in pairs]
            given: Tensor | None = weights if digests else None
            return [functools.partial(module.copy_blocks, source, a, target, b, given) for a, b in pairs]

        if options.sweep:
            for words, blocks, warps in itertools.product((512, 1024, 2048), (1, 4, 8, 16), (4, 8)):
                kv_copy.WORDS, kv_copy.BLOCKS, kv_copy.NUM_WARPS = words, blocks, warps
                seconds = graph_seconds(calls(True, True))
                rate = 2 * num_ids * BLOCK_BYTES[model] / seconds
                report("kv_copy sweep", f"{model} {num_ids} w{words} b{blocks} n{warps}", us=seconds * 1e6,
                       of_copy=rate / copy)  # fmt: skip
            continue
        for name, copies, digests in (("copy", True, False), ("copy+digest", True, True), ("digest", False, True)):
            moved, eager = (1 + copies) * num_ids * BLOCK_BYTES[model], calls(copies, digests, reference)[:2]
            shape = f"{model} {num_ids} blocks"
            report_against_copy(f"kv_copy {name}", shape, calls(copies, digests), eager, moved, copy)


if __name__ == "__main__":
    main()

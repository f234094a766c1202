"""Whether the persistent kernel gives the same bits for the same inputs while other processes use the GPU.

    python -m benchmarks.kernels.persistent.stress_persistent --model benchmarks/configs/qwen3-0.6b --others 6

The other processes come and go: every second one runs the kernel, too, the rest multiply matrices. Prints the first
layer with other K or V for some of the steps that differ, and exits with 1 if there are any. Needs a Hopper.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.persistent.random_decoder import RandomDecoder
from engine.models.families import family_of
from engine.models.hf_config import config_from_hf, read_hf_config
from engine.persistent.decoder import shape_of
from kernels.gpu.persistent.shape import Shape

LENGTHS = 1, 65, 700, 1000
NUM_LAYERS, BLOCK_SIZE = 4, 64
BATCH, MAX_TOLD = 50, 8
OTHER_SECONDS = 4.0, 8.0  # lifetime of one of the other processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="benchmarks/configs/qwen3-0.6b", help="folder with a config.json")
    parser.add_argument("--e4m3", action="store_true", help="weights in e4m3 with a scale for each row")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--others", type=int, default=6, help="processes that use the GPU meanwhile")
    options = parser.parse_args()
    raw = read_hf_config(Path(options.model))
    config = family_of(raw["architectures"][0]).adapt_config(config_from_hf(raw), raw)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    shape = shape_of(config, BLOCK_SIZE, programs, options.e4m3)
    others: list[SpawnProcess | None] = [None] * options.others
    try:
        result = repeat(Steps(shape), options.seconds, others)
    finally:
        for process in filter(None, others):
            process.kill()
    print(json.dumps({"model": Path(options.model).name, "e4m3": options.e4m3, "others": options.others, **result}))
    raise SystemExit(int(result["different"] > 0))


class Steps:
    """Steps with rows of LENGTHS, and their results on an otherwise idle GPU."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self._decoder = RandomDecoder(shape, NUM_LAYERS, max(LENGTHS), "cuda")
        self._inputs = {length: self._decoder.inputs(length) for length in LENGTHS}
        self._places = {length: divmod(int(self._inputs[length][3]), BLOCK_SIZE) for length in LENGTHS}
        for _ in range(2):  # the second time with K and V of the first
            self._wanted = {length: self.take(length) for length in LENGTHS}
        torch.cuda.synchronize()

    def take(self, length: int) -> tuple[Tensor, Tensor]:
        """Return hidden states, and K and V of all layers (layers, 2, kv_heads, HEAD_DIM)."""
        hidden = self._decoder.kernel.step(*self._inputs[length])
        block, offset = self._places[length]
        return hidden, self._decoder.pool[block, :, :, :, offset].clone()

    def difference(self, length: int, found: tuple[Tensor, Tensor]) -> dict[str, float] | None:
        """Describe the difference to the expected result; None: equal bit by bit."""
        hidden, kv = found
        wanted, wanted_kv = self._wanted[length]
        if torch.equal(hidden, wanted) and torch.equal(kv, wanted_kv):
            return None
        layers = (kv != wanted_kv).flatten(1).any(1).nonzero().flatten().tolist()
        return {"length": length, "layer": min(layers, default=NUM_LAYERS), "nan": int(hidden.isnan().sum())}


def repeat(steps: Steps, seconds: float, others: list[SpawnProcess | None]) -> dict[str, int]:
    """Take steps for `seconds`. others: other processes, which are restarted when they end."""
    chosen, began = random.Random(0), time.monotonic()
    num_steps = num_different = 0
    while time.monotonic() - began < seconds:
        for index, process in enumerate(others):
            if process is None or not process.is_alive():
                others[index] = multiprocessing.get_context("spawn").Process(target=disturb, args=(index,))
                others[index].start()  # type: ignore[union-attr]  # it was just made
        lengths = chosen.choices(LENGTHS, k=BATCH)
        for length, found in [(length, steps.take(length)) for length in lengths]:
            difference = steps.difference(length, found)
            if difference is not None and num_different < MAX_TOLD:
                print(json.dumps(difference), flush=True)
            num_different += difference is not None
        num_steps += BATCH
    return {"steps": num_steps, "different": num_different}


def disturb(index: int) -> None:
    """Use the GPU for a while, with matrix products or the persistent kernel."""
    until = time.monotonic() + random.uniform(*OTHER_SECONDS)
    if index % 2:
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        steps = Steps(Shape(1024, 16, 8, 3072, BLOCK_SIZE, programs).tuned())
        while time.monotonic() < until:
            for length in LENGTHS:
                steps.take(length)
            torch.cuda.synchronize()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    while time.monotonic() < until:
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

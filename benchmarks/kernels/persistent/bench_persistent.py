"""All layers of a dense decoder for one row in one persistent kernel, instead of launches for each.

    python -m benchmarks.kernels.persistent.bench_persistent --keys 1024,4000 --stages

What launches take in the same layers: `python -m benchmarks.profile.decode_profile --batch 1`, all kernels but the
head's, the embedding's and the sampler's. Needs a Hopper. Results are compared with torch in float32 first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import int_list
from benchmarks.kernels.persistent.random_decoder import RandomDecoder, step_bytes
from benchmarks.kernels.timing import graph_seconds
from engine.models.families import family_of
from engine.models.hf_config import config_from_hf, read_hf_config
from engine.persistent.decoder import shape_of
from kernels.gpu.persistent.shape import Shape
from kernels.gpu.persistent.stamps import STAGES

CHECKED_LAYERS, MAX_ERROR = 3, 2.0**-8  # of bfloat16
WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="benchmarks/configs/qwen3-0.6b", help="folder with a config.json")
    parser.add_argument("--keys", type=int_list, default=[1024], help="tokens of context, the new one included")
    parser.add_argument("--halves", type=int_list, default=[2, 3, 4], help="half slots on their way at a time")
    parser.add_argument("--slots", type=int, default=0, help="of 16 KiB; 0: as in the engine")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0, help="0: the model's")
    parser.add_argument("--e4m3", action="store_true", help="weights in e4m3 with a scale for each row")
    parser.add_argument("--stages", action="store_true", help="median cycles of each stage of a layer")
    options = parser.parse_args()
    raw = read_hf_config(Path(options.model))
    config = family_of(raw["architectures"][0]).adapt_config(config_from_hf(raw), raw)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    shape = shape_of(config, options.block_size, programs, options.e4m3)
    if options.slots:
        shape = replace(shape, slots=options.slots)
    if not shape.fits():
        parser.error(f"the kernel does not take {shape}")
    torch.manual_seed(0)
    check(shape, max(options.keys))
    num_layers = options.layers or config.num_layers
    decoder = RandomDecoder(shape, num_layers, max(options.keys), "cuda")
    for halves in options.halves:
        decoder.kernel.set_shape(halves_ahead=halves)
        for num_keys in options.keys:
            seconds = graph_seconds([partial(decoder.kernel.step, *decoder.inputs(num_keys))])
            rate = step_bytes(shape, num_layers, num_keys) / seconds / 1e9
            print(
                json.dumps({"keys": num_keys, "halves": halves, "us": round(seconds * 1e6, 1), "gb_s": round(rate)})
            )
    if options.stages:
        decoder.kernel.set_shape(halves_ahead=options.halves[0], traces=True)
        print(json.dumps(stage_cycles(decoder, options.keys[0])))


def check(shape: Shape, num_keys: int) -> None:
    """Compare one step with torch's; tests/kernels/persistent has more checks."""
    decoder = RandomDecoder(shape, CHECKED_LAYERS, num_keys, "cuda")
    wanted = decoder.reference(num_keys)
    error = ((decoder.kernel.step(*decoder.inputs(num_keys)).float() - wanted).norm() / wanted.norm()).item()
    print(json.dumps({"keys": num_keys, "relative_error": error}))
    if not error < MAX_ERROR:
        raise SystemExit(f"the kernel is wrong: {error} at {num_keys} keys")


def stage_cycles(decoder: RandomDecoder, num_keys: int) -> dict[str, list[int]]:
    """Return median and 95th percentile, over programs and layers, of clock cycles between stamps.

    A stage in which a program has no part begins with the next one.
    """
    for _ in range(WARM_STEPS):
        decoder.kernel.step(*decoder.inputs(num_keys))
    stamps = decoder.kernel.stamps[1:-1, :, : len(STAGES) + 1].double()
    for stage in range(len(STAGES) - 1, -1, -1):
        stamps[:, :, stage] = torch.where(stamps[:, :, stage] > 0, stamps[:, :, stage], stamps[:, :, stage + 1])
    cycles = (stamps[:, :, 1:] - stamps[:, :, :-1]).flatten(0, 1)
    longest = cycles.sort(0).values[-len(cycles) // 20]
    return {
        stage: [int(median), int(most)]
        for stage, median, most in zip(STAGES, cycles.median(0).values.tolist(), longest.tolist(), strict=True)
    }


if __name__ == "__main__":
    main()

"""Decode of a batch whose rows name several LoRA adapters, and of the same batch without, in turn.

    python -m benchmarks.adapters --device cuda --model benchmarks/configs/qwen2.5-7b --load-format dummy
        --enable-lora --streams 1,8,64 --adapters 32 --rank 16 --rounds 5
    python -m benchmarks.adapters --model DIR --enable-lora --lora-target-modules q_proj,v_proj

Adapters have random weights and lie in a temporary folder, where they are read from when requests name them: the
time of that is printed, too. They change all linear layers, or those of --lora-target-modules: q_proj and v_proj are
PEFT's choice where none is made. The time of prompts is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import harness
from common.config import add_arguments, from_namespace
from common.lora.adapter_ref import AdapterRef
from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loader.load import read_config
from engine.lora.layers import HEAD, layers_of
from engine.lora.metrics import METRICS
from engine.lora.settings import LoraSettings
from engine.models.config import ModelConfig

LOAD_SECONDS = METRICS[-1].name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__.splitlines()[0])
    add_arguments(parser, EngineConfig)
    parser.set_defaults(device="cpu")
    parser.add_argument("--adapters", type=int, default=32, help="that rows name in turn")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=harness.int_list, default=[64], help="rows of the batch: 1,8,64")
    parser.add_argument("--input", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    harness.add_cpu_time_argument(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    clock = harness.choose_clock(options)
    config = from_namespace(EngineConfig, options)
    of_adapters: dict[str, Any] = {"max_loras": options.adapters, "max_lora_rank": options.rank}
    config = replace(config, max_num_seqs=max(options.streams), prefix_cache=False, **of_adapters)
    engine = assemble(config).engine
    gc.collect()
    gc.freeze()  # as an engine process does
    with tempfile.TemporaryDirectory() as folder:
        model = read_config(resolve_model(config.model), config)
        targets = config.of(LoraSettings).lora_target_modules
        names = write_adapters(Path(folder), model, targets, options.adapters, options.rank)
        run(engine, names, options, clock)  # reads the adapters
        seconds = engine.figures()[LOAD_SECONDS]
    for streams in options.streams:
        own = [names[row % len(names)] for row in range(streams)]
        speeds = [[run(engine, rows, options, clock) for rows in ([""] * streams, own)]
                  for _ in range(1 + options.rounds)][1:]  # fmt: skip
        plain, adapted = (statistics.median(each) for each in zip(*speeds, strict=True))
        ratios = [with_adapters / without for without, with_adapters in speeds]
        figures = {
            "targets": targets or "all", "streams": streams, "adapters": min(options.adapters, streams),
            "rank": options.rank, "plain_tok_s": round(plain, 1), "tok_s": round(adapted, 1),
            "ratio": round(statistics.median(ratios), 3), "ratios": f"{min(ratios):.3f} to {max(ratios):.3f}",
            "load_ms": f"{1e3 * statistics.median(seconds):.0f}, at most {1e3 * max(seconds):.0f}",
            "device": config.device,
        }  # fmt: skip
        harness.report(figures, options.json)
    return 0


def write_adapters(folder: Path, model: ModelConfig, targets: str, count: int, rank: int) -> list[str]:
    """Write adapters with equal weights but different scales. Return the references for requests."""
    wanted = tuple(targets.split(","))  # every name ends with "", the default
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": wanted}
    shapes, layers = {}, layers_of(model)
    for layer in layers.linears:
        for module in layer.modules:
            if module.name.endswith(wanted) and (module.name != HEAD or HEAD in wanted):
                shapes[f"{module.name}.lora_A.weight"] = rank, layer.num_columns
                shapes[f"{module.name}.lora_B.weight"] = module.num_outputs, rank
    if layers.embedding.endswith(wanted) and targets:
        shapes[f"{layers.embedding}.lora_embedding_A"] = rank, layers.vocab_size
        shapes[f"{layers.embedding}.lora_embedding_B"] = layers.hidden_size, rank
    tensors = {
        f"base_model.model.{name}": torch.randn(shape, dtype=torch.bfloat16) * 0.01 for name, shape in shapes.items()
    }
    names = []
    for index in range(count):
        own = folder / str(index)
        own.mkdir(parents=True)
        (own / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": rank + index}))
        save_file(tensors, own / "adapter_model.safetensors")
        names.append(str(AdapterRef.of(own)))
    return names


def run(engine: Engine, adapters: Sequence[str], options: argparse.Namespace, clock: harness.Clock) -> float:
    """Return the decoded tokens per second with one row for each reference; empty: without an adapter."""
    rng = random.Random()
    requests = [
        engine.add_request(
            harness.random_prompt(rng, engine.vocab_size, options.input), harness.greedy(options.output), adapter=name
        )
        for name in adapters
    ]
    harness.prefill(engine, requests)
    began, done = clock(), harness.num_output_tokens(requests)
    harness.drain(engine)
    return (harness.num_output_tokens(requests) - done) / (clock() - began)


if __name__ == "__main__":
    sys.exit(main())

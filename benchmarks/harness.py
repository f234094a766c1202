"""Harness of the engine benchmarks: arguments, prompts, steps and lines of figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cli.load.workload import read_trace
from common.model_files import resolve_model
from engine.engine import Engine
from engine.gguf.config import config_from_gguf
from engine.gguf.weights import GgufFile, GgufWeights
from engine.models.config import ModelConfig
from engine.request import Request, RequestOutput, SamplingParams

Clock = Callable[[], float]


def int_list(text: str) -> list[int]:
    """Parse an argument like `1,8,64`."""
    return [int(part) for part in text.split(",") if part]


def add_cpu_time_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its processor time: for busy machines")


def choose_clock(options: argparse.Namespace) -> Clock:
    if not options.cpu_time:
        return time.perf_counter
    torch.set_num_threads(1)
    return time.process_time


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def trace_lengths(trace: Path, rows: int, longest: int, seed: int) -> list[int]:
    """Return the contexts of `rows` rows at some moment; a request stays for as many steps as its answer has tokens.

    longest: tokens of a request, with its answer.
    """
    draw = random.Random(seed)
    requests = [row for row in read_trace(trace, 5000) if row.num_input_tokens + row.num_output_tokens <= longest]
    chosen = draw.choices(requests, [row.num_output_tokens for row in requests], k=rows)
    return [row.num_input_tokens + draw.randrange(row.num_output_tokens + 1) for row in chosen]


def num_output_tokens(requests: Iterable[Request]) -> int:
    return sum(len(request.output_token_ids) for request in requests)


def prefill(engine: Engine, requests: Sequence[Request], num_tokens: int = 1) -> None:
    """Step until every request has its first tokens."""
    while any(len(request.output_token_ids) < num_tokens for request in requests):
        if engine.step().stats is None:
            time.sleep(0.001)  # a thread that reads an adapter needs the interpreter


def drain(engine: Engine, on_step: Callable[[], object] = lambda: None) -> list[RequestOutput]:
    """Step until no work is left; return all outputs. Raises RuntimeError if a request failed."""
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step().outputs
        on_step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    return outputs


def transformers_generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Decode exactly `num_tokens` greedily with transformers' `generate`."""
    token_ids = torch.tensor(prompts, device=model.device)
    model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )


def report(figures: Mapping[str, Any], as_json: bool = True, line: str = "") -> None:
    """Print one JSON object with the machine, or a line for people: by default all figures with their names."""
    line = line or "  ".join(f"{name} {value}" for name, value in figures.items())
    on_gpu = str(figures.get("device", "cpu")).startswith("cuda")
    print(json.dumps({**figures, "machine": machine_name(on_gpu)}) if as_json else line, flush=True)


def read_metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples over its labels."""
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def default_weights() -> tuple[ModelConfig, GgufWeights]:
    """Return config and weights of the default model, in float32 on a CPU."""
    file = GgufFile(resolve_model("").path)
    config = config_from_gguf(file.metadata, "LlamaForCausalLM", has_output_weight=False)
    return config, GgufWeights(file, config, True, torch.float32, torch.device("cpu"))


@cache
def machine_name(on_gpu: bool) -> str:
    """Return `NVIDIA H200`, or the processor and the number of cores that this process may use."""
    if on_gpu:
        return torch.cuda.get_device_name()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"

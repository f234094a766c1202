"""The engine on a CPU beside transformers (and llama.cpp, where llama-cpp-python is installed), in one run.

    python -m benchmarks.comparisons.compare_cpu --rounds 3 --json
    python -m benchmarks.comparisons.compare_cpu --model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

One stream of the default model under transformers in bfloat16, one and eight streams under the engine, each round one
after the other, so that a busy machine slows all of them. What counts is the ratio. --model: another GGUF file, of
which llama.cpp's one stream is what others are compared with.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.config import ModelConfig
from engine.models.families import family_of

TRANSFORMERS, LLAMA_CPP = "transformers bfloat16, 1 stream", "llama.cpp, 1 stream"
MAX_TOKEN_ID = 40_000  # of prompts: ordinary tokens of the default model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparisons.compare_cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="", help="GGUF file; default: the default model")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    harness.add_cpu_time_argument(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    contestants = open_contestants(options.model, options.output, harness.choose_clock(options))
    rng = random.Random()
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(options.rounds + 1):
        for name, run in contestants.items():
            speed = run(harness.random_prompt(rng, MAX_TOKEN_ID, options.input))
            if round_number:  # the first round warms up
                speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    base = medians[LLAMA_CPP if options.model else TRANSFORMERS]
    for name, speed in medians.items():
        figures = {"what": name, "tok_s": round(speed, 1), "ratio": round(speed / base, 2)}
        harness.report(figures, options.json, f"{name:36} {speed:8.1f} tok/s  {speed / base:5.2f}x")
    return 0


def open_contestants(path: str, num_output: int, clock: harness.Clock) -> dict[str, Callable[[list[int]], float]]:
    """Return functions by name, from a prompt to decoded tokens per second, without the prompt's time."""
    parts = assemble(EngineConfig(path, device="cpu", prefix_cache=False, max_model_len=2048))
    contestants = {} if path else {TRANSFORMERS: transformers_speed(parts.loaded.config, num_output, clock)}
    contestants |= {
        "mini-infer, 1 stream": engine_speed(parts.engine, num_output, 1, clock),
        "mini-infer, 8 streams": engine_speed(parts.engine, num_output, 8, clock),
    }
    try:
        import llama_cpp  # type: ignore[import-not-found]
    except ImportError:
        if path:
            raise SystemExit("llama-cpp-python is not installed") from None
        return contestants
    threads = torch.get_num_threads()
    model = llama_cpp.Llama(str(resolve_model(path).path), n_ctx=2048, n_threads=threads, verbose=False)

    def llama_speed(prompt: list[int]) -> float:
        tokens = model.generate(prompt, temp=0.0)
        next(tokens)
        began = clock()
        for _ in range(num_output - 1):
            next(tokens)
        return (num_output - 1) / (clock() - began)

    contestants[LLAMA_CPP] = llama_speed
    return contestants


def engine_speed(
    engine: Engine, num_output: int, num_streams: int, clock: harness.Clock
) -> Callable[[list[int]], float]:
    params = harness.greedy(num_output)

    def run(prompt: list[int]) -> float:
        requests = [engine.add_request(prompt[index:] + prompt[:index], params) for index in range(num_streams)]
        harness.prefill(engine, requests)
        began = clock()
        done = harness.num_output_tokens(requests)
        harness.drain(engine)
        return (num_streams * num_output - done) / (clock() - began)

    return run


def transformers_speed(config: ModelConfig, num_output: int, clock: harness.Clock) -> Callable[[list[int]], float]:
    """Return a function that times transformers' `generate` on the same weights in bfloat16."""
    import transformers

    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
    )
    model: Any = transformers.LlamaForCausalLM(theirs)
    model.load_state_dict(named_weights())
    model = model.to(torch.bfloat16).train(False)

    def generate(prompt: list[int], count: int) -> float:
        began = clock()
        harness.transformers_generate(model, [prompt], count)
        return clock() - began

    def run(prompt: list[int]) -> float:
        return (num_output - 1) / (generate(prompt, num_output) - generate(prompt, 1))

    return run


def named_weights() -> dict[str, torch.Tensor]:
    """Return the default model's weights in float32 under transformers' names."""
    config, weights = harness.default_weights()
    _, shapes = family_of(config.architecture).skeleton(config)
    held = {name: weights.take(name, shape) for name, shape in shapes.items()}
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    return held


if __name__ == "__main__":
    sys.exit(main())

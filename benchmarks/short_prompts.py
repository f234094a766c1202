"""First token of short and of mostly cached prompts on a GPU, with prompt graphs and without, in turn.

    python -m benchmarks.short_prompts --model benchmarks/configs/qwen3-0.6b --load-format dummy --quant-mode none

Every figure is the median of `--repeats`, eager and graph, twice: prompts alone; `--new` tokens after cached ones;
and the longest step of 8 decoding rows that such a prompt joins. `--max-keys` gives graphs longer contexts than
engines do. With `--enable-lora` all requests name an adapter of `--rank`.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.adapters import write_adapters
from benchmarks.harness import drain, greedy, prefill, random_prompt
from common.config import add_arguments, from_namespace
from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.loader.load import read_config
from engine.lora.settings import LoraSettings
from engine.prompt_graphs import graphs as prompt_graphs

LENGTHS = (10, 56, 250, 500, 1016)
NUM_DECODING = 8
CONTEXT = 1000  # of each decoding row
NUM_WARMUP = 3


class ShortPrompts:
    """One engine on a GPU."""

    def __init__(self, config: EngineConfig, gpu: GpuConfig, adapter: str = "") -> None:
        self._adapter = adapter
        parts = assemble(config, gpu=gpu)
        gc.collect()
        gc.freeze()  # as an engine process does
        self.engine, self._runner = parts.engine, parts.runner
        self._graphs = parts.runner.prompt_graphs
        self._vocab_size = parts.loaded.config.vocab_size
        self._random = random.Random(0)

    def prompt(self, num_tokens: int) -> list[int]:
        return random_prompt(self._random, self._vocab_size, num_tokens)

    def first_token_ms(self, num_new: int, cached: tuple[int, ...] = ()) -> float:
        """Return the time to the first token of a new prompt after the tokens `cached`."""
        prompt = [*cached, *self.prompt(num_new)]
        began = time.perf_counter()
        self.engine.add_request(prompt, greedy(1), adapter=self._adapter)
        drain(self.engine)
        return (time.perf_counter() - began) * 1e3

    def longest_step_ms(self, num_new: int, cached: tuple[int, ...] = ()) -> float:
        """Return the longest step from a prompt's arrival to its first token, while others decode."""
        others = [
            self.engine.add_request(self.prompt(CONTEXT), greedy(64), adapter=self._adapter)
            for _ in range(NUM_DECODING)
        ]
        prefill(self.engine, others, 5)
        request = self.engine.add_request([*cached, *self.prompt(num_new)], greedy(1), adapter=self._adapter)
        longest, last = 0.0, time.perf_counter()
        while not request.output_token_ids:
            self.engine.step()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        drain(self.engine)
        return longest * 1e3

    def compare(self, what: str, measure: Callable[[], float], repeats: int) -> None:
        medians = []
        for graphs in (None, self._graphs) * 2:
            self._runner.prompt_graphs = graphs
            medians.append(statistics.median([measure() for _ in range(NUM_WARMUP + repeats)][NUM_WARMUP:]))
        eager, graph = medians[::2], medians[1::2]
        print(f"{what}, ms: eager {eager[0]:.2f}, {eager[1]:.2f}  graph {graph[0]:.2f}, {graph[1]:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, EngineConfig)
    add_arguments(parser, GpuConfig)
    parser.add_argument("--repeats", type=int, default=22)
    parser.add_argument("--new", default="56", help="tokens after cached ones, separated by commas")
    parser.add_argument("--cached", default="960,7000", help="cached tokens, separated by commas")
    parser.add_argument("--max-keys", type=int, default=prompt_graphs.MAX_SPLIT_KEYS)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter, with --enable-lora")
    options = parser.parse_args()
    prompt_graphs.MAX_KEYS = prompt_graphs.MAX_SPLIT_KEYS = options.max_keys
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))
    return 0


def run(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything. folder: for an adapter."""
    config, adapter = from_namespace(EngineConfig, options), ""
    settings = config.of(LoraSettings)
    if settings.enable_lora:
        model = read_config(resolve_model(config.model), config)
        [adapter] = write_adapters(folder, model, settings.lora_target_modules, 1, options.rank)
    bench = ShortPrompts(config, from_namespace(GpuConfig, options), adapter)
    for length in LENGTHS:
        bench.compare(f"{length} tokens", partial(bench.first_token_ms, length), options.repeats)
    for num_cached in map(int, options.cached.split(",")):
        cached = tuple(bench.prompt(num_cached))
        for num_new in map(int, options.new.split(",")):
            what = f"{num_new} after {num_cached} cached"
            bench.compare(what, partial(bench.first_token_ms, num_new, cached), options.repeats)
            what = f"longest step of {NUM_DECODING} rows that {what} join"
            bench.compare(what, partial(bench.longest_step_ms, num_new, cached), options.repeats // 2)


if __name__ == "__main__":
    sys.exit(main())

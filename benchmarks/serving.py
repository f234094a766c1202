"""Figures of a whole local cluster through HTTP, each beside its comparison in the same run.

    python -m benchmarks.serving [--scenario streams,prefix,first,load,gap,handoff] [--rounds 5] [--transformers]
                                 [--prompt-tokens 2000] [--chunk-tokens 256] [--clients 64,256] [-- flags of serve]

streams: output tokens/s of 8 concurrent streams beside one.
prefix: time to the first token of a prompt whose first 1,000 tokens are cached, beside a prompt that is new.
first: time to the first token of new prompts of 56 to 1,024 tokens, and of one mostly cached. On GPUs, with shapes of
--load-format dummy: -- --model benchmarks/configs/qwen2.5-7b --load-format dummy.
load: output tokens/s, first tokens and gaps of --clients that each send one request after the other, with 1,024 new
tokens in and 128 out; a round is one request of each.
gap: longest pause of a running stream while a 2,000-token prompt arrives: one worker that computes it at once, one
that computes it in chunks, and a prefill worker that keeps it away from the stream.
handoff: first token of a prompt of --prompt-tokens, computed in chunks of --chunk-tokens, and the gap between its
first and second token beside the later ones: one worker, and a prefill and a decode worker with the KV pulled at the
end or progressively. On GPUs: --scenario handoff --prompt-tokens 16000 --chunk-tokens 2048 --model ...

Starts the clusters that it needs, one after the other, and prints one JSON object a line. Wall-clock times on a busy
machine mean little; the ratios within one line are what to read.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import random_prompt, read_metric, report
from benchmarks.model_folder import with_tokenizer
from cli.client.api_client import first_model
from cli.client.event_stream import RequestRecord
from cli.cluster.ports import LOOPBACK, free_ports
from cli.load.client import Client, Target
from cli.load.runner import closed_loop
from cli.load.workload import PlannedRequest, Prompt, PromptMaker
from cli.local_cluster.local_server import LocalServer
from common.errors import UnavailableError

NUM_STREAMS = 8
STREAM_TOKENS = 96
PREFIX_TOKENS = 1000
FIRST_TOKENS, FIRST_CACHED = (56, 512, 1024), 960
LONG_PROMPT_TOKENS = 2000
LOAD_TOKENS = 1024, 128  # in and out
HANDOFF_TOKENS = 24  # of an answer: enough for a median of later gaps
PREFETCHED = "mini_infer_kv_prefetched_tokens_total"
UNCHUNKED_TOKENS = 4096
CHUNK_TOKENS = 256
SEED = 1  # of the prompts; drawn fresh in every round


class Session:
    """Requests to one cluster, with prompts that share nothing with earlier ones."""

    def __init__(self, url: str, rng: random.Random, vocab_size: int) -> None:
        """vocab_size: as for `PromptMaker`."""
        self._client = Client(Target(url, first_model(url)))
        self._rng = rng
        self._maker = PromptMaker(vocab_size)

    def close(self) -> None:
        """Close its connections, in the loop that they were opened in."""
        self._client.close()

    def prompt(self, length: int, prefix: Prompt | None = None) -> Prompt:
        """Return a prompt of `length` new tokens, after those of `prefix`."""
        new = self._maker.fresh(self._rng, length)
        if prefix is None:
            return new
        return f"{prefix} {new}" if isinstance(new, str) else [*prefix, *new]

    async def ask(self, prompt: Prompt, num_output_tokens: int) -> RequestRecord:
        request = PlannedRequest(0.0, prompt, num_output_tokens)
        return _checked(await self._client.complete(request, 0.0, 0.0))

    async def many(self, count: int, num_output_tokens: int) -> float:
        """Return the output tokens per second of `count` requests at once."""
        requests = [PlannedRequest(0.0, self.prompt(64), num_output_tokens) for _ in range(count)]
        records = await closed_loop(self._client.complete, requests, count, lambda record: None)
        for record in records:
            _checked(record)
        seconds = max(record.end for record in records) - min(record.sent for record in records)
        return sum(record.num_output_tokens for record in records) / seconds

    async def load(self, num_clients: int, rounds: int) -> dict[str, float]:
        """Return the output tokens per second of a closed loop, and percentiles of first tokens and gaps in ms."""
        prompts = [self.prompt(LOAD_TOKENS[0]) for _ in range(num_clients * rounds)]
        requests = [PlannedRequest(0.0, prompt, LOAD_TOKENS[1]) for prompt in prompts]
        records = await closed_loop(self._client.complete, requests, num_clients, lambda record: None)
        seconds = max(_checked(record).end for record in records) - min(record.sent for record in records)
        first = statistics.quantiles((record.ttft * 1e3 for record in records), n=100)
        gaps = statistics.quantiles((gap * 1e3 for record in records for gap in record.gaps), n=100)
        return {
            "tok_s": sum(record.num_output_tokens for record in records) / seconds,
            "ttft_p50_ms": first[49], "ttft_p99_ms": first[98], "gap_p50_ms": gaps[49], "gap_p99_ms": gaps[98],
        }  # fmt: skip

    async def longest_gap(self) -> float:
        """Return the longest gap, in seconds, of a stream during which a long prompt arrives."""
        stream = asyncio.create_task(self.ask(self.prompt(64), STREAM_TOKENS))
        await asyncio.sleep(0.3)
        arrival = time.perf_counter()
        await self.ask(self.prompt(LONG_PROMPT_TOKENS), 1)
        end = time.perf_counter()
        times = (await stream).chunk_times
        pairs = itertools.pairwise(times)
        return max((after - before for before, after in pairs if after > arrival and before < end), default=0.0)


def _checked(record: RequestRecord) -> RequestRecord:
    if record.error:
        raise UnavailableError(f"a request failed: {record.error}")
    return record


async def measure_streams(session: Session, rounds: int) -> dict[str, Any]:
    one, many = [], []
    for _ in range(rounds):
        one.append(await session.many(1, STREAM_TOKENS))
        many.append(await session.many(NUM_STREAMS, STREAM_TOKENS))
    alone, together = statistics.median(one), statistics.median(many)
    return {"one_stream_tok_s": alone, f"{NUM_STREAMS}_streams_tok_s": together, "ratio": together / alone}


async def measure_prefix(session: Session, rounds: int) -> dict[str, Any]:
    cold, warm, cached = [], [], []
    for _ in range(rounds):
        prefix = session.prompt(PREFIX_TOKENS)
        cold.append((await session.ask(session.prompt(16, prefix), 4)).ttft * 1e3)
        hit = await session.ask(session.prompt(16, prefix), 4)
        warm.append(hit.ttft * 1e3)
        cached.append(hit.num_cached_tokens)
    new, shared = statistics.median(cold), statistics.median(warm)
    return {"ttft_new_ms": new, "ttft_shared_ms": shared, "lower_by": 1 - shared / new, "cached_tokens": min(cached)}


async def measure_gap(session: Session, rounds: int) -> dict[str, Any]:
    return {"longest_gap_ms": statistics.median([await session.longest_gap() * 1e3 for _ in range(rounds)])}


async def measure_handoff(session: Session, rounds: int, num_tokens: int, metrics_url: str) -> dict[str, Any]:
    """metrics_url: of the decode worker."""
    await session.ask(session.prompt(num_tokens), HANDOFF_TOKENS)  # connects the workers
    before = await asyncio.to_thread(read_metric, metrics_url, PREFETCHED)
    records = [await session.ask(session.prompt(num_tokens), HANDOFF_TOKENS) for _ in range(rounds)]
    prefetched = await asyncio.to_thread(read_metric, metrics_url, PREFETCHED) - before
    return {
        "prefetched_tokens": prefetched / rounds,
        "prompt_tokens": min(record.num_prompt_tokens for record in records),
        "first_token_ms": statistics.median(record.ttft for record in records) * 1e3,
        "second_token_ms": statistics.median(record.gaps[0] for record in records) * 1e3,
        "later_token_ms": statistics.median(gap for record in records for gap in record.gaps[1:]) * 1e3,
    }


async def measure_first(session: Session, rounds: int) -> dict[str, Any]:
    """Measure one client with streams of four tokens."""
    figures: dict[str, Any] = {}
    for length in FIRST_TOKENS:
        records = [await session.ask(session.prompt(length), 4) for _ in range(rounds + 2)][2:]
        figures[f"ttft_{length}_ms"] = statistics.median(record.ttft for record in records) * 1e3
    prefix = session.prompt(FIRST_CACHED)
    records = [await session.ask(session.prompt(56, prefix), 4) for _ in range(rounds + 2)][2:]
    figures[f"ttft_56_behind_{FIRST_CACHED}_cached_ms"] = statistics.median(r.ttft for r in records) * 1e3
    return figures


async def measure_load(session: Session, rounds: int, num_clients: Sequence[int]) -> dict[str, Any]:
    return {f"{count}_clients": await session.load(count, rounds) for count in num_clients}


Measure = Callable[[Session, int], Coroutine[Any, Any, dict[str, Any]]]
MEASURES: dict[str, Measure] = {"streams": measure_streams, "prefix": measure_prefix, "first": measure_first}


def on_cluster(measure: Measure, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Start a cluster, warm it up, measure, stop it."""

    async def measured(url: str, vocab_size: int) -> dict[str, Any]:
        session = Session(url, random.Random(SEED), vocab_size)
        for count in (1, NUM_STREAMS):
            await session.many(count, 8)
        return await measure(session, options.rounds)

    with tempfile.TemporaryDirectory() as folder:
        flags, vocab_size = with_tokenizer(flags, Path(folder))
        with LocalServer(flags) as server:
            return uvloop.run(measured(server.url, vocab_size))


def gap_scenario(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Measure equal streams and prompts on three clusters."""
    clusters = {
        "unchunked": ["--prefill=0", f"--max-num-batched-tokens={UNCHUNKED_TOKENS}"],
        "chunked": ["--prefill=0", f"--max-num-batched-tokens={CHUNK_TOKENS}"],
        "disaggregated": ["--prefill=1", "--decode=1", f"--max-num-batched-tokens={UNCHUNKED_TOKENS}"],
    }
    patient = "--stall-seconds=120"  # an unchunked prompt is one long step, not a dead engine
    gaps = {name: on_cluster(measure_gap, options, [*own, patient, *flags]) for name, own in clusters.items()}
    values = {f"longest_gap_{name}_ms": gap["longest_gap_ms"] for name, gap in gaps.items()}
    base = gaps["unchunked"]["longest_gap_ms"]
    lower = {f"{name}_lower_by": 1 - gaps[name]["longest_gap_ms"] / base for name in ("chunked", "disaggregated")}
    return values | lower


def handoff_scenario(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Measure equal prompts on three clusters. `second_over_later_ms`: the cost of the hand-off over a step."""
    clusters = {"aggregated": (0, []), "at_end": (1, ["--no-progressive-pull"]), "progressive": (1, [])}
    common = ["--decode=1", f"--max-num-batched-tokens={options.chunk_tokens}", "--local-prefill-tokens=0", *flags]
    found = {}
    for name, (num_prefill, own) in clusters.items():
        port, *_ = free_ports(num_prefill + 3)  # of each service's metrics; decode follows prefill workers
        url = f"http://{LOOPBACK}:{port + num_prefill}/metrics"
        measure = functools.partial(measure_handoff, num_tokens=options.prompt_tokens, metrics_url=url)
        of_cluster = [f"--prefill={num_prefill}", f"--metrics-port={port}", *own, *common]
        found[name] = on_cluster(measure, options, of_cluster)
    for figures in found.values():
        figures["second_over_later_ms"] = figures["second_token_ms"] - figures["later_token_ms"]
    return {"chunk_tokens": options.chunk_tokens} | found


def transformers_tok_s(rounds: int) -> float:
    """Return the speed of one stream of the default model with transformers in bfloat16, in this process."""
    from benchmarks.comparisons.compare_cpu import MAX_TOKEN_ID, transformers_speed
    from common.model_files import resolve_model
    from engine.config import EngineConfig
    from engine.loader.load import load_model

    config = load_model(resolve_model(""), EngineConfig(device="cpu", quant_mode="none")).config
    run = transformers_speed(config, STREAM_TOKENS, time.perf_counter)
    rng = random.Random(SEED)
    return statistics.median(run(random_prompt(rng, MAX_TOKEN_ID, 64)) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description="A local cluster through HTTP.")
    parser.add_argument("--scenario", default="streams,prefix,gap", help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action="store_true", help="streams: beside one stream of transformers")
    parser.add_argument(
        "--prompt-tokens", type=int, default=LONG_PROMPT_TOKENS, help="handoff: length of the prompts"
    )
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS, help="handoff: tokens of a step")
    parser.add_argument("--clients", default="64,256", help="load: how many at a time, each measured")
    options, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    for name in options.scenario.split(","):
        if name == "gap":
            result = gap_scenario(options, flags)
        elif name == "handoff":
            result = handoff_scenario(options, flags)
        elif name in MEASURES or name == "load":
            counts = [int(count) for count in options.clients.split(",")]
            measure = MEASURES.get(name) or functools.partial(measure_load, num_clients=counts)
            result = on_cluster(measure, options, flags)
            if name == "streams" and options.transformers:
                result["transformers_one_stream_tok_s"] = theirs = transformers_tok_s(options.rounds)
                result["streams_over_transformers"] = result[f"{NUM_STREAMS}_streams_tok_s"] / theirs
        else:
            parser.error(f"no scenario {name!r}: choose streams, prefix, first, gap or handoff")
        report({"scenario": name, "rounds": options.rounds} | result)


if __name__ == "__main__":
    main()

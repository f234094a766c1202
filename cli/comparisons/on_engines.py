"""Comparisons on engines in this process; each loads what it needs and frees it.

The arms of a comparison are measured in turn, for up to three rounds, and the best of each counts: other load on the
machine makes a round slower, never faster. num_threads: of each engine; 0: one per core.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cli.comparisons.result import Arm, Comparison, gain, told, told_of_pauses
from cli.comparisons.timing import Stepper, decode_speed, params, random_prompt, rounds
from engine.offline.llm import LLM

NUM_STREAMS = 8
DECODED = 33  # tokens of a stream: 32 gaps
CACHED_PROMPT = 512
LONG_PROMPT = 1024
KV_CACHE_GB = 0.25
CHUNK = 128
NUM_RUNNING = 3
REPEATED = "one two three four five six seven eight nine ten "
QUANTIZED = ("int8-weight", "int4-weight")


@contextmanager
def loaded(model: str, **settings: Any) -> Iterator[LLM]:
    """Yield a warmed-up engine: first steps compile and allocate. Its pool leaves room for a second engine."""
    llm = LLM(model, **{"kv_cache_gb": KV_CACHE_GB, **settings})
    try:
        decode_speed(llm.engine, [random_prompt(llm, 40, "warm")], params(4))
        yield llm
    finally:
        del llm
        gc.collect()


def batching(model: str, num_threads: int = 0) -> Comparison:
    """Compare the tokens per second of one stream and of eight together."""
    speeds = {1: 0.0, NUM_STREAMS: 0.0}
    with loaded(model, num_threads=num_threads) as llm:
        for number in rounds():
            for num_streams, best in speeds.items():
                prompts = [random_prompt(llm, 32, (number, num_streams, stream)) for stream in range(num_streams)]
                speeds[num_streams] = max(best, decode_speed(llm.engine, prompts, params(DECODED))[0])
    return Comparison(
        "Batching",
        "tokens/s",
        [Arm("1 stream", speeds[1]), Arm(f"{NUM_STREAMS} streams", speeds[NUM_STREAMS])],
        told(
            gain(speeds[1], speeds[NUM_STREAMS]),
            f"{NUM_STREAMS} streams together got {{}} times the tokens of one.",
            f"{NUM_STREAMS} streams together got fewer tokens than one, by a factor of {{}}.",
            f"{NUM_STREAMS} streams together got about as many tokens as one.",
        ),
    )


def prefix_cache(model: str, num_threads: int = 0) -> Comparison:
    """Compare the time to the first token of a new prompt and of the same prompt again."""
    cold: list[float] = []
    cached: list[float] = []
    num_cached = num_tokens = 0
    with loaded(model, num_threads=num_threads) as llm:
        for number in rounds():
            prompt = random_prompt(llm, CACHED_PROMPT, ("prefix", number))
            for times in (cold, cached):
                stepper = Stepper(llm.engine)
                asked = stepper.add(prompt, params(1))
                stepper.run([asked])
                times.append(1e3 * asked.ttft)
            num_cached, num_tokens = asked.request.num_cached_tokens, len(prompt)
    factor = gain(min(cold), min(cached), less_is_better=True)
    found = f"{num_cached} of its {num_tokens} tokens were cached"
    return Comparison(
        "Prefix cache",
        "ms to the first token",
        [Arm("new prompt", min(cold)), Arm("the same again", min(cached))],
        told(
            factor,
            f"The same prompt again had its first token {{}} times sooner; {found}.",
            f"The same prompt again had its first token later, by a factor of {{}}; {found}.",
            f"The same prompt again had its first token about as late; {found}.",
        ),
        less_is_better=True,
    )


def pause_beside_prompt(llm: LLM, seed: object) -> tuple[float, float]:
    """Return running streams' longest pause while a long prompt is computed, and its time to first token; in ms."""
    stepper = Stepper(llm.engine)
    running = [stepper.add(random_prompt(llm, 32, (seed, stream)), params(400)) for stream in range(NUM_RUNNING)]
    while min(len(timed.times) for timed in running) < 4:
        stepper.step()
    late = stepper.add(random_prompt(llm, LONG_PROMPT, (seed, "late")), params(1))
    stepper.run([late])
    end = late.times[0]
    stepper.step()  # outputs of the step that the prompt was in
    pause = max(timed.longest_pause(late.sent, end) for timed in running)
    stepper.abort()
    return 1e3 * pause, 1e3 * late.ttft


def chunked_prefill(model: str, num_threads: int = 0) -> Comparison:
    """Compare the longest pause of running streams when a long prompt comes, in one step and in chunks."""
    whole: list[tuple[float, float]] = []
    chunks: list[tuple[float, float]] = []
    with (
        loaded(model, num_threads=num_threads, max_num_batched_tokens=2 * LONG_PROMPT) as at_once,
        loaded(model, num_threads=num_threads, max_num_batched_tokens=CHUNK) as in_chunks,
    ):
        for number in rounds():
            whole.append(pause_beside_prompt(at_once, number))
            chunks.append(pause_beside_prompt(in_chunks, number))
    pause, ttft = min(whole)
    chunked_pause, chunked_ttft = min(chunks)
    cost = f"the prompt's first token came after {chunked_ttft:.0f} ms instead of {ttft:.0f} ms"
    return Comparison(
        "Chunked prefill",
        "longest pause in ms",
        [Arm("prompt in one step", pause), Arm(f"in chunks of {CHUNK} tokens", chunked_pause)],
        told_of_pauses(NUM_RUNNING, pause, chunked_pause, cost),
        less_is_better=True,
    )


def quantization(model: str, num_threads: int = 0) -> Comparison:
    """Compare the tokens per second of one stream with weights of 16, 8 and 4 bits."""
    speeds = dict.fromkeys(("bfloat16", *QUANTIZED), 0.0)
    with ExitStack() as engines:
        opened = {
            name: engines.enter_context(
                loaded(
                    model,
                    num_threads=num_threads,
                    quant_mode="none" if name == "bfloat16" else name,
                    dtype="bfloat16",
                )
            )
            for name in speeds
        }
        for number in rounds():
            for name, llm in opened.items():
                prompt = random_prompt(llm, 32, number)
                speeds[name] = max(speeds[name], decode_speed(llm.engine, [prompt], params(DECODED))[0])
    fastest = max(QUANTIZED, key=speeds.__getitem__)
    return Comparison(
        "Quantization",
        "tokens/s of one stream",
        [Arm(name, speed) for name, speed in speeds.items()],
        told(
            gain(speeds["bfloat16"], speeds[fastest]),
            f"The fastest quantized weights, {fastest}, decoded {{}} times as fast as bfloat16.",
            f"The fastest quantized weights, {fastest}, decoded slower than bfloat16, by a factor of {{}}.",
            f"The fastest quantized weights, {fastest}, decoded about as fast as bfloat16.",
        ),
    )


def speculation(model: str, num_threads: int = 0) -> Comparison:
    """Compare the tokens per second of a stream that repeats its prompt, without and with drafts from the prompt."""
    speeds = {0: 0.0, None: 0.0}
    with loaded(model, num_threads=num_threads, speculative="ngram") as llm:
        prompt = llm.tokenizer.encode(6 * REPEATED, add_special_tokens=True)
        token_ids = []
        for _number in rounds():
            for num_drafts, best in speeds.items():
                speed, request = decode_speed(llm.engine, [prompt], params(2 * DECODED, num_drafts))
                speeds[num_drafts] = max(best, speed)
                token_ids.append(request.token_ids)
        drafts = request.request
    found = f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens} drafts were accepted"
    same = "the tokens were the same" if token_ids.count(token_ids[0]) == len(token_ids) else "tokens differed"
    return Comparison(
        "Speculation",
        "tokens/s of one stream",
        [Arm("without drafts", speeds[0]), Arm("drafts of n-grams", speeds[None])],
        told(
            gain(speeds[0], speeds[None]),
            f"Text that repeats came {{}} times as fast with drafts; {found}, {same}.",
            f"Text that repeats came slower with drafts, by a factor of {{}}; {found}, {same}.",
            f"Text that repeats came about as fast with drafts; {found}, {same}.",
        ),
    )


def cuda_graphs(model: str, num_threads: int = 0) -> Comparison:
    """Compare the tokens per second of one stream on a GPU, with kernels launched one by one and as graphs."""
    speeds = {False: 0.0, True: 0.0}
    with (
        loaded(model, num_threads=num_threads, use_cuda_graph=False) as plain,
        loaded(model, num_threads=num_threads) as graphs,
    ):
        for number in rounds():
            for use_graphs, llm in ((False, plain), (True, graphs)):
                prompt = random_prompt(llm, 32, number)
                speeds[use_graphs] = max(speeds[use_graphs], decode_speed(llm.engine, [prompt], params(129))[0])
    return Comparison(
        "CUDA graphs",
        "tokens/s of one stream",
        [Arm("launches one by one", speeds[False]), Arm("graphs", speeds[True])],
        told(
            gain(speeds[False], speeds[True]),
            "One stream decoded {} times as fast with graphs.",
            "One stream decoded slower with graphs, by a factor of {}.",
            "One stream decoded about as fast with graphs.",
        ),
    )

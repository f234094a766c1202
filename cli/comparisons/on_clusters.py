"""The comparison that needs services: one worker for both phases, or one for each, on the same machine."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise

from cli.client.api_client import ApiClient
from cli.client.event_stream import RequestRecord
from cli.comparisons.result import Arm, Comparison, told_of_pauses
from cli.local_cluster.local_server import LocalServer

NUM_RUNNING = 2
NUM_WORDS = 1024  # in the long prompt; at most an eighth of the context
NUM_ROUNDS = 2
# One worker computes prompts within its decode steps; two workers share the machine.
BOTH = ("--prefill", "0", "--decode", "1")
APART = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "64")


def disaggregation(model_flags: Sequence[str]) -> Comparison:
    """Compare the longest pause of running streams when a long prompt comes, with one worker and with two."""
    together, ttft = _measure((*model_flags, *BOTH))
    apart, ttft_apart = _measure((*model_flags, *APART))
    cost = f"the prompt's first token came after {ttft_apart:.0f} ms instead of {ttft:.0f} ms"
    return Comparison(
        "Disaggregation",
        "longest pause in ms",
        [Arm("one worker", together), Arm("prefill and decode", apart)],
        told_of_pauses(NUM_RUNNING, together, apart, cost),
        less_is_better=True,
    )


def _measure(flags: Sequence[str]) -> tuple[float, float]:
    """Return (longest pause, time to the long prompt's first token) in ms, of the best round."""
    with LocalServer((*flags, "--host-tier-gb", "0")) as server, ApiClient(server.url) as client:
        model = client.choose_model()
        context = int(client.get_json("/v1/models")["data"][0]["max_model_len"])
        _pause(client, model, context, 16)  # the first pull opens connections for later ones
        found = [_pause(client, model, context, min(NUM_WORDS, context // 8)) for _ in range(NUM_ROUNDS)]
        return min((each for each in found if each[0] > 0), default=found[0])


def _pause(client: ApiClient, model: str, context: int, num_words: int) -> tuple[float, float]:
    """Measure one round."""
    is_over = threading.Event()
    times: list[list[float]] = []  # of the pieces of each answer

    def stream() -> None:
        """Read one answer after another: a small model may finish one before the prompt comes."""
        while not is_over.is_set():
            times.append(pieces_at := [])
            with closing(_ask(client, model, "Count from one to one thousand in words.", context // 4)) as pieces:
                for _piece in pieces:
                    pieces_at.append(time.perf_counter())
                    if is_over.is_set():
                        return

    with ThreadPoolExecutor(NUM_RUNNING) as pool:
        running = [pool.submit(stream) for _ in range(NUM_RUNNING)]
        try:
            while sum(len(pieces_at) > 4 for pieces_at in times) < NUM_RUNNING and not any(
                task.done() for task in running
            ):
                time.sleep(0.005)
            start = time.perf_counter()
            for _piece in _ask(client, model, f"{uuid.uuid4()} " + "word " * num_words, 1):
                pass
            end = time.perf_counter()  # of the answer, as its one token may not be a whole character
        finally:
            is_over.set()
        for task in running:
            task.result()
    pauses = [
        after - before
        for pieces_at in times
        for before, after in pairwise(pieces_at)
        if after > start and before < end
    ]
    return 1e3 * max(pauses, default=0.0), 1e3 * (end - start)


def _ask(client: ApiClient, model: str, text: str, max_tokens: int) -> Generator[str]:
    return client.stream_chat(
        model, [{"role": "user", "content": text}], RequestRecord(), temperature=0, max_tokens=max_tokens,
        ignore_eos=True,
    )  # fmt: skip

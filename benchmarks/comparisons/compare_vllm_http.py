"""mini-infer and vLLM in turn through HTTP on one machine: clients that each send one request after the other.

    python -m benchmarks.comparisons.compare_vllm_http --model benchmarks/configs/qwen2.5-7b --clients 1,64,256
        --vllm-python VENV/bin/python

Both servers have their defaults and random weights; completions are streamed, with 1,024 new tokens in and 128 out.
One JSON object a line: output tokens per second, first tokens and gaps, as in `benchmarks.serving --scenario load`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import uvloop

from benchmarks.harness import int_list, report
from benchmarks.model_folder import with_tokenizer
from benchmarks.serving import Session
from cli.cluster.ports import LOOPBACK, free_ports
from cli.local_cluster.local_server import LocalServer, server_answers
from common.errors import UnavailableError

START_SECONDS = 600.0
WARM_UP_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="mini-infer and vLLM through HTTP.")
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--clients", type=int_list, default=[1, 64, 256], help="how many at a time, each measured")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    options, more = parser.parse_known_args(argv)  # only for mini-infer
    with tempfile.TemporaryDirectory() as folder:
        flags, vocab_size = with_tokenizer([f"--model={options.model}", "--load-format=dummy"], Path(folder))
        ours = LocalServer(["--quant-mode=none", "--prefill=0", "--decode=1", *flags, *more])
        for engine, server in ("mini-infer", ours), ("vLLM", VllmServer(options.vllm_python, flags)):
            with server:
                session = Session(server.url, random.Random(1), vocab_size)
                uvloop.run(measure(engine, session, options.clients, options.rounds))
    return 0


async def measure(engine: str, session: Session, clients: Sequence[int], rounds: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for count in clients:
        await session.many(count, WARM_UP_TOKENS)
        report({"engine": engine, "clients": count} | await session.load(count, rounds) | {"device": device})
    session.close()


class VllmServer(contextlib.AbstractContextManager["VllmServer"]):
    """`url` answers once it is entered. Raises UnavailableError if the server ends before that."""

    def __init__(self, python: str, flags: Sequence[str]) -> None:
        port = free_ports(1)[0]
        where = f"--host={LOOPBACK}", f"--port={port}", "--dtype=bfloat16"
        self._command = python, "-m", "vllm.entrypoints.openai.api_server", *where, *flags
        self.url = f"http://{LOOPBACK}:{port}"

    def __enter__(self) -> VllmServer:
        environment = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random", **os.environ}
        self._process = subprocess.Popen(
            self._command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:  # Ctrl-C, too: do not leave the server running
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise UnavailableError(f"vLLM's server ended with status {self._process.returncode}")
            if server_answers(self.url):
                return
            time.sleep(0.5)
        raise UnavailableError(f"vLLM's server does not answer within {START_SECONDS:.0f} s")

    def _stop(self) -> None:
        """End the server with its engine processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


if __name__ == "__main__":
    sys.exit(main())

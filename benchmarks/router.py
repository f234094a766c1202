"""Cost of the router: time added to the first token, and chunks per second that it can stream.

    python -m benchmarks.router [--clients 1,32] [--tokens 256] [--seconds 5] [--json]

A scripted worker (no model) answers an idle cluster at once, one token per step for all requests together, with a
pause after each step: one that never pauses finishes a request inside the transport's buffers before the next one is
read, so that every report carries a single token. `direct` is an HTTP server that writes the same
number of chunks without any work, measured in the same run by the same load generator. `worker` is one request at a
time sent straight to the worker's stream, from the router's core, until its first token is back: what the transport
and the worker take; the router adds the rest. The worker and the load generator share one core, whatever stands in
front has the other. On a busy machine compare the rows of one run with each other; `cpu` is the router's own
processor time per chunk, which does not depend on neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import uvloop

from benchmarks.router_load import Client, serve_direct
from common.net.rpc import open_channel
from common.token_ids import pack_ids
from protos import decode_pb2_grpc
from protos import types_pb2 as pb

_BODY = {"messages": [{"role": "user", "content": "Say something about routers."}], "stream": True, "seed": 1}


@dataclass
class Figures:
    """One row of the report."""

    target: str
    clients: int
    requests: int
    first_chunk_ms_p50: float
    first_chunk_ms_p99: float
    tokens_per_s: float
    chunks_per_s: float
    cpu_us_per_chunk: float


async def measure_worker(address: str, num_tokens: int, seconds: float) -> Figures:
    """Send requests straight to the worker, one at a time, over a stream like the router's."""
    firsts: list[float] = []
    sampling = pb.SamplingParams(max_tokens=num_tokens, seed=1)
    async with open_channel(address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Attach()
        await call.read()
        cpu_before, began = time.process_time(), time.perf_counter()
        while time.perf_counter() < began + seconds:
            submit = pb.Submit(
                request_id=f"direct-{len(firsts)}", prompt_token_ids=pack_ids(range(64)), sampling=sampling, keep=True
            )
            sent = time.perf_counter()
            await call.write(pb.Command(submit=submit))
            deltas = (await call.read()).deltas
            firsts.append(time.perf_counter() - sent)
            while not deltas[-1].finish_reason:
                deltas = (await call.read()).deltas
        cpu, wall = time.process_time() - cpu_before, time.perf_counter() - began
        call.cancel()
    return figures("worker", 1, firsts, num_tokens, len(firsts) * num_tokens, wall, cpu)


def figures(
    target: str, clients: int, firsts: list[float], num_tokens: int, num_chunks: int, wall: float, cpu: float
) -> Figures:
    firsts = sorted(firsts)
    return Figures(
        target=target,
        clients=clients,
        requests=len(firsts),
        first_chunk_ms_p50=round(statistics.median(firsts) * 1e3, 3),
        first_chunk_ms_p99=round(firsts[int(len(firsts) * 0.99)] * 1e3, 3),
        tokens_per_s=round(len(firsts) * num_tokens / wall),
        chunks_per_s=round(num_chunks / wall),
        cpu_us_per_chunk=round(cpu / max(num_chunks, 1) * 1e6, 2),
    )


async def measure(target: str, url: str, pid: int, num_clients: int, num_tokens: int, seconds: float) -> Figures:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({**_BODY, "max_tokens": num_tokens}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    loop = asyncio.get_running_loop()
    cpu_before, began = cpu_seconds(pid), time.perf_counter()
    clients = []
    for _ in range(num_clients):
        _, client = await loop.create_connection(lambda: Client(request, began + seconds), host, int(port))
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    wall, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu_before
    firsts = [value for client in clients for value in client.first_chunk_seconds]
    num_chunks = sum(client.num_chunks for client in clients)
    return figures(target, num_clients, firsts, num_tokens, num_chunks, wall, cpu)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(core: int, *arguments: str) -> subprocess.Popen[str]:
    def pin() -> None:
        os.sched_setaffinity(0, {core})

    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=pin)


def ready_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a process of the benchmark did not start")
    return line.rpartition(" ")[2]


async def from_core(core: int, worker: str, num_tokens: int, seconds: float) -> Figures:
    """Run `measure_worker` in a separate process on the router's core."""
    flags = ("-m", "benchmarks.router", "--measure-worker", worker, "--tokens", str(num_tokens))
    process = start(core, *flags, "--seconds", str(seconds))
    output, _ = await asyncio.to_thread(process.communicate)
    return Figures(**json.loads(output))


def run(client_counts: list[int], num_tokens: int, seconds: float, step_seconds: float) -> list[Figures]:
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[0], cores[-1]
    os.sched_setaffinity(0, {ours})
    worker_flags = ("--pause-seconds", str(step_seconds))
    processes = [start(ours, "-m", "tests.harness.scripted_worker", "--max-model-len", "8192", *worker_flags)]
    try:
        worker = ready_address(processes[0])
        router_arguments = ("-m", "router", "--model", "dry-run", "--decode", worker, "--port", "0")
        processes.append(start(theirs, *router_arguments, "--log-level", "warning"))
        processes.append(start(theirs, "-m", "benchmarks.router", "--serve-direct", str(num_tokens)))
        urls = {"router": ready_address(processes[1]), "direct": ready_address(processes[2])}
        pids = {"router": processes[1].pid, "direct": processes[2].pid}
        time.sleep(1.0)  # the worker attaches

        async def measure_all() -> list[Figures]:
            rows = [await from_core(theirs, worker, num_tokens, seconds)]
            for count in client_counts:
                for target in ("direct", "router"):
                    await measure(target, urls[target], pids[target], count, num_tokens, 0.5)  # warm-up
                    rows.append(await measure(target, urls[target], pids[target], count, num_tokens, seconds))
            return rows

        return uvloop.run(measure_all())
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead and capacity of the router.")
    parser.add_argument("--clients", default="1,32", help="numbers of concurrent clients")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer, one chunk each")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument(
        "--step-seconds", type=float, default=0.0002, help="pause of the scripted worker after each step"
    )
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--serve-direct", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--measure-worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_worker:
        row = uvloop.run(measure_worker(arguments.measure_worker, arguments.tokens, arguments.seconds))
        print(json.dumps(asdict(row)))
        return
    if arguments.serve_direct:
        uvloop.run(serve_direct(arguments.serve_direct))
        return
    rows = run(
        [int(count) for count in arguments.clients.split(",")],
        arguments.tokens,
        arguments.seconds,
        arguments.step_seconds,
    )
    if not arguments.json:
        print(
            f"{'target':8} {'clients':>7} {'first p50':>10} {'p99':>9} {'tokens/s':>9} {'chunks/s':>9} {'cpu us':>7}"
        )
    for row in rows:
        if arguments.json:
            print(json.dumps(asdict(row)))
            continue
        print(
            f"{row.target:8} {row.clients:7} {row.first_chunk_ms_p50:7.3f} ms {row.first_chunk_ms_p99:6.2f} ms "
            f"{row.tokens_per_s:9} {row.chunks_per_s:9} {row.cpu_us_per_chunk:7.2f}"
        )


if __name__ == "__main__":
    main()

"""Memory of every process of a cluster under requests that never repeat anything.

    python -m benchmarks.memory [--minutes 30] [--concurrency 8] [--plot memory.png] [-- flags of serve]

Each request has a prompt, session, salt and request id that no other one has; a tenth of the clients leave in the
middle of a stream. Starts a dry-run cluster, samples the private memory of its processes every 10 s, and prints, for
each, the samples and how much it grew a minute after the first third of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from cli.local_server import LocalServer

SAMPLE_SECONDS = 10.0
SETTLED_SHARE = 1 / 3  # of the run, after which memory may not grow any more
NAMES = (" router ", " prefill_service ", " decode_service ", " worker.engine_main ", " kvstore ")


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def name_of(pid: int) -> str:
    """`router`, `decode_service`, ..., with the process id; empty for what is none of the services."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    found = next((name.strip() for name in NAMES if name in command and "cli serve" not in command), "")
    return f"{found}-{pid}" if found else ""


def private_mb(pid: int) -> float:
    """Anonymous resident memory: a pool or host tier that processes share is bounded, and fills in its own time."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) * 1024 / 1e6


async def load(url: str, until: float, counter: list[int]) -> None:
    """Run one client after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        while time.monotonic() < until:
            counter[0] += 1
            number = counter[0]
            leaves = number % 10 == 0
            body: dict[str, Any] = {
                "prompt": f"{uuid.uuid4().hex} {uuid.uuid4().hex} {number}",
                "max_tokens": 300 if leaves else 4,
                "user": f"user-{number}",
                "cache_salt": uuid.uuid4().hex,
                "stream": number % 2 == 0,
            }
            headers = {"x-session-id": uuid.uuid4().hex, "x-request-id": uuid.uuid4().hex}
            if leaves:
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                    async for _ in reply.aiter_bytes():
                        break
            else:
                (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def measure(url: str, minutes: float, concurrency: int) -> tuple[int, dict[str, list[tuple[float, float]]]]:
    """Number of requests, and (minute, MB) samples of each process."""
    samples: dict[str, list[tuple[float, float]]] = {}
    counter = [0]
    begin = time.monotonic()
    until = begin + 60.0 * minutes
    processes = {name: pid for pid in descendants(os.getpid()) if (name := name_of(pid))}
    clients = [asyncio.create_task(load(url, until, counter)) for _ in range(concurrency)]
    while time.monotonic() < until:
        await asyncio.sleep(min(SAMPLE_SECONDS, max(until - time.monotonic(), 0.1)))
        for name, pid in processes.items():
            samples.setdefault(name, []).append(((time.monotonic() - begin) / 60.0, private_mb(pid)))
    await asyncio.gather(*clients)
    return counter[0], samples


def growth_per_minute(samples: list[tuple[float, float]]) -> float:
    """MB a minute by least squares, over the samples after the run has settled."""
    settled = [sample for sample in samples if sample[0] >= samples[-1][0] * SETTLED_SHARE]
    mean_x = sum(x for x, _ in settled) / len(settled)
    mean_y = sum(y for _, y in settled) / len(settled)
    spread = sum((x - mean_x) ** 2 for x, _ in settled)
    return sum((x - mean_x) * (y - mean_y) for x, y in settled) / spread if spread else 0.0


def plot(samples: dict[str, list[tuple[float, float]]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in samples.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name.rpartition("-")[0])
    axes.set(xlabel="minutes", ylabel="private resident memory (MB)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--plot", default="", help="file for a picture")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of mini-infer serve")
    arguments = parser.parse_args()
    with LocalServer(["--dry-run", "--num-gpu-blocks=512", *arguments.serve_flags]) as server:
        num_requests, samples = asyncio.run(measure(server.url, arguments.minutes, arguments.concurrency))
    for name, points in samples.items():
        line = {
            "process": name.rpartition("-")[0],
            "requests": num_requests,
            "mb": [round(points[0][1], 1), round(points[-1][1], 1)],
            "growth_mb_per_minute": round(growth_per_minute(points), 3),
            "samples": [round(mb, 2) for _, mb in points],
        }
        print(json.dumps(line), flush=True)
    if arguments.plot:
        plot(samples, arguments.plot)


if __name__ == "__main__":
    main()

"""Memory of every process of a cluster under requests that never repeat anything.

    python -m benchmarks.memory [--minutes 30] [--concurrency 8] [--rate 130] [--aborts 0.1] [--limit 0.05]
                                [--plot memory.png] [--json memory.json] [-- flags of serve]

Each request has a prompt, session, salt and request id that no other one has; a share of the clients leave in the
middle of a stream. Starts a dry-run cluster, samples the memory of its processes every 10 s, and prints a table: of
each process its private memory, how much that grew a minute in the second half of the run, and whether that is within
the limit. Shared memory (KV pool, host tier) is told apart: it fills up to its size as pages are used for the first
time. Exits with 1 when a process grows beyond the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.local_cluster.local_server import LocalServer
from common.resident import resident

SAMPLE_SECONDS = 10.0
SETTLED_SHARE = 1 / 2  # of the run, after which memory may no longer grow
ABORTED_TOKENS = 300  # of an answer whose client leaves after the first bytes
NAMES = (" router ", " prefill_service ", " decode_service ", " worker.engine_process.main ", " kvstore ")


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def name_of(pid: int) -> str:
    """Return `router`, `decode_service`, ..., with the process id; empty if it is not a service."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    found = next((name.strip() for name in NAMES if name in command and "cli serve" not in command), "")
    return f"{found}-{pid}" if found else ""


@dataclass(frozen=True)
class Sample:
    """Resident memory of a process in MB."""

    minute: float
    private: float
    shared: float  # of the KV pool and the host tier: used pages, at most their size


def sample(pid: int, minute: float) -> Sample:
    found = resident(pid)
    return Sample(minute, found.private_bytes / 1e6, found.shared_bytes / 1e6)


@dataclass
class Traffic:
    """State that the clients share."""

    aborts: float  # share of clients that leave
    rate: float  # requests per second in total; 0: as fast as they are answered
    num_requests: int = 0
    num_aborted: int = 0
    next_start: float = 0.0

    async def turn(self) -> tuple[int, bool]:
        """Wait for the next request's time; return its number, and whether its client leaves."""
        self.num_requests += 1
        number = self.num_requests
        leaves = int(number * self.aborts) > int((number - 1) * self.aborts)
        self.num_aborted += leaves
        if self.rate:
            now = time.monotonic()
            self.next_start = max(self.next_start + 1 / self.rate, now - 1.0)  # a delay is not made up for
            await asyncio.sleep(max(self.next_start - now, 0.0))
        return number, leaves


async def load(url: str, until: float, traffic: Traffic) -> None:
    """Run one client's requests in sequence."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        while time.monotonic() < until:
            number, leaves = await traffic.turn()
            body: dict[str, Any] = {
                "prompt": f"{uuid.uuid4().hex} {uuid.uuid4().hex} {number}",
                "max_tokens": ABORTED_TOKENS if leaves else 4,
                "ignore_eos": True,
                "user": f"user-{number}",
                "cache_salt": uuid.uuid4().hex,
                "stream": leaves or number % 2 == 0,
            }
            headers = {"x-session-id": uuid.uuid4().hex, "x-request-id": uuid.uuid4().hex}
            if leaves:
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                    async for _ in reply.aiter_bytes():
                        break
            else:
                (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def measure(url: str, minutes: float, concurrency: int, traffic: Traffic) -> dict[str, list[Sample]]:
    """Return samples of each process."""
    samples: dict[str, list[Sample]] = {}
    begin = time.monotonic()
    until = begin + 60.0 * minutes
    processes = {name: pid for pid in descendants(os.getpid()) if (name := name_of(pid))}
    clients = [asyncio.create_task(load(url, until, traffic)) for _ in range(concurrency)]
    while time.monotonic() < until:
        await asyncio.sleep(min(SAMPLE_SECONDS, max(until - time.monotonic(), 0.1)))
        for name, pid in processes.items():
            samples.setdefault(name, []).append(sample(pid, (time.monotonic() - begin) / 60.0))
    await asyncio.gather(*clients)
    return samples


def growth_per_minute(samples: list[Sample]) -> float:
    """Return private MB per minute by least squares, over the samples after the run has settled."""
    settled = [(one.minute, one.private) for one in samples if one.minute >= samples[-1].minute * SETTLED_SHARE]
    mean_x = sum(x for x, _ in settled) / len(settled)
    mean_y = sum(y for _, y in settled) / len(settled)
    spread = sum((x - mean_x) ** 2 for x, _ in settled)
    return sum((x - mean_x) * (y - mean_y) for x, y in settled) / spread if spread else 0.0


def report(samples: dict[str, list[Sample]], traffic: Traffic, limit: float) -> bool:
    """Print the table; return whether all processes are within the limit."""
    minutes = max(points[-1].minute for points in samples.values())
    print(
        f"{traffic.num_requests} requests, {traffic.num_aborted} of them aborted, in {minutes:.1f} minutes "
        f"({traffic.num_requests / minutes / 60:.0f} a second); memory in MB"
    )
    print(f"{'process':<18}{'first':>8}{'half':>8}{'last':>8}{'MB/min':>9}{'shared':>8}  verdict (limit {limit:g})")
    is_good = True
    for name, points in samples.items():
        growth = growth_per_minute(points)
        is_good &= growth <= limit
        shown = "".join(f"{point.private:>8.1f}" for point in (points[0], points[len(points) // 2], points[-1]))
        verdict = "steady" if growth <= limit else "GROWS"
        print(f"{name.rpartition('-')[0]:<18}{shown}{growth:>9.3f}{points[-1].shared:>8.1f}  {verdict}")
    return is_good


def plot(samples: dict[str, list[Sample]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in samples.items():
        axes.plot(
            [point.minute for point in points], [point.private for point in points], label=name.rpartition("-")[0]
        )
    axes.set(xlabel="minutes", ylabel="private resident memory (MB)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: as fast as they are answered")
    parser.add_argument("--aborts", type=float, default=0.1, help="share of the clients that leave")
    parser.add_argument("--limit", type=float, default=0.05, help="MB a minute that a process may grow")
    parser.add_argument("--plot", default="", help="file for a picture")
    parser.add_argument("--json", default="", help="file for all samples")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of mini-infer serve")
    arguments = parser.parse_args()
    traffic = Traffic(arguments.aborts, arguments.rate)
    flags = ["--dry-run", "--num-gpu-blocks=512", "--host-tier-gb=0.02", *arguments.serve_flags]  # full at half-time
    with LocalServer(flags) as server:
        samples = asyncio.run(measure(server.url, arguments.minutes, arguments.concurrency, traffic))
    is_good = report(samples, traffic, arguments.limit)
    if arguments.json:
        found = {name: [asdict(point) for point in points] for name, points in samples.items()}
        Path(arguments.json).write_text(json.dumps(found))
    if arguments.plot:
        plot(samples, arguments.plot)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()

"""What the page at / costs: bytes and router time for 100 workers, and frames in Chromium.

    python -m benchmarks.page --chromium   # --chromium: frame times, too; needs playwright and Debian's chromium
    python -m benchmarks.page --serve 8123 # only such a router, for a look in a browser

Links of workers that do not exist get made-up reports; everything from there on is the router's own code.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from cli.cluster.ports import free_ports
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.app import create_app
from router.config import HttpConfig, RouterConfig
from router.explain.log import ExplainLog
from router.gateway import Gateway
from router.journal import Journal
from router.page.feed import Feed
from router.routing.policy import Decision
from router.routing.views import Candidate
from router.served_model import LoadedModel, serve_models
from router.server import _serve, listen, protocol_for
from router.workers.worker_link import Leg, WorkerLink
from router.workers.worker_stream import WorkerStream
from tests.harness.waiting import wait_until

NUM_PREFILL, NUM_DECODE, WORKERS_A_HOST = 40, 60, 8
REPORT_SECONDS = 0.25
MEASURED_SECONDS = 10.0
NUM_BLOCKS = 8192
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# Frame times of the page while events arrive, in milliseconds, and how long each event's handling took the thread.
FRAMES = """(seconds) => new Promise((done) => {
  const times = [], long = [];
  new PerformanceObserver((list) => long.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ entryTypes: ['longtask'] });
  const start = performance.now();
  const frame = (now) => {
    times.push(now);
    if (now - start < seconds * 1000) requestAnimationFrame(frame);
    else done({ frames: times.slice(1).map((time, index) => time - times[index]), long });
  };
  requestAnimationFrame(frame);
})"""


class Crowd:
    """Invented workers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.workers.start = _nothing  # type: ignore[method-assign] # their names lead nowhere
        self._random = random.Random(1)
        self._step = 0
        self.links = [self._link("prefill", index) for index in range(NUM_PREFILL)]
        self.links += [self._link("decode", index) for index in range(NUM_DECODE)]

    def _link(self, role: str, index: int) -> WorkerLink:
        address = f"10.0.{role == 'decode':d}.{1 + index // WORKERS_A_HOST}:{9000 + index}"
        model = self._gateway.models[0].workers
        link = model.add(role, address)
        info = pb.WorkerInfo(
            worker_id=f"{role}-{index}", role=role, epoch=1, model="dry-run", device=f"cuda:{index % WORKERS_A_HOST}",
            num_blocks=NUM_BLOCKS, block_bytes=1 << 20, transports=["cuda_ipc", "nixl", "tcp"], max_num_seqs=256,
            quantization="none", attention_backend="fa3", version="0.1.0",
        )  # fmt: skip
        link.attached(info, WorkerStream(None, (), info.worker_id))
        self._gateway.workers._links[(role, address)] = link
        return link

    async def live(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self.step()

    def step(self) -> None:
        """Send a report of each worker, and end a few requests."""
        log = self._gateway.models[0].dispatcher.log
        assert isinstance(log, ExplainLog)
        self._step += 1
        for index, link in enumerate(self.links):
            link.apply(pb.StepReport(load=self._load(index, link.role)))
        for _ in range(4):
            self._request(log)

    def _load(self, index: int, role: str) -> pb.LoadReport:
        wave = 0.5 + 0.45 * math.sin(self._step / 20 + index)
        used = int(NUM_BLOCKS * 0.7 * wave)
        running = int(64 * wave) if role == "decode" else int(4 * wave)
        return pb.LoadReport(
            num_running=running, num_waiting=self._random.randrange(3), num_leases=self._random.randrange(5),
            kv_blocks_total=NUM_BLOCKS, kv_blocks_cached=(NUM_BLOCKS - used) // 2,
            kv_blocks_free=NUM_BLOCKS - used - (NUM_BLOCKS - used) // 2, num_steps=self._step,
            step_seconds=0.01 + 0.01 * wave, step_decode_tokens=running * 20 if role == "decode" else 0,
            step_prefill_tokens=0 if role == "decode" else int(4000 * wave),
        )  # fmt: skip

    def _request(self, log: ExplainLog) -> None:
        prefill, decode = self._random.choice(self.links[:NUM_PREFILL]), self._random.choice(self.links[NUM_PREFILL:])
        now, tokens = time.monotonic(), self._random.randrange(100, 8000)
        times = [now - 2.0, now - 1.9, now - 1.5, now - 1.5, now - 1.45]
        name = f"chatcmpl-{self._random.randbytes(16).hex()}-0"
        journal = Journal(name, [1] * tokens, pb.SamplingParams(), now, times[0])
        events = (f"prefill on {prefill.worker_id}", "first output of prefill", f"decode on {decode.worker_id}")
        for at, event in zip(times[1:], (*events, "first output of decode"), strict=True):
            journal.note(at, event)
        chosen = Candidate(decode.worker_id, prefill.worker_id, 0, 0.0, {}, 0, True)
        log.decided(journal, Decision(chosen, (chosen,), "cost"))
        listener: Any = None
        for link, measured in (
            (prefill, pb.RequestTimes(queue_seconds=0.02, prefill_seconds=0.3)),
            (decode, pb.RequestTimes(kv_pull_seconds=0.02, num_pulled_tokens=tokens, transport="nixl")),
        ):
            leg = Leg(WorkerId("x"), link, listener, None, now, times=measured)
            log.first_delta(journal, leg, None)
        journal.outcome = "stop"
        log.ended(journal, now)


async def _nothing() -> None: ...


def new_gateway(port: int) -> Gateway:
    config = RouterConfig(model="dry-run", decode="127.0.0.1:1", port=port)
    loaded = LoadedModel("", "dry-run", load_tokenizer(resolve_model("dry-run")))
    return Gateway(config, serve_models(config, [loaded]))


async def serve(port: int) -> None:
    """Run a router on this port, whose workers are a crowd."""
    gateway, http = new_gateway(port), HttpConfig()
    reports = asyncio.create_task(Crowd(gateway).live())
    await _serve(gateway, http, protocol_for(http), listen("127.0.0.1", port))
    reports.cancel()


async def snapshots() -> None:
    """Measure time and bytes of one second's snapshot."""
    gateway = new_gateway(0)
    create_app(gateway)
    crowd, feed, seconds = Crowd(gateway), Feed(gateway), []
    for second in range(1, 50):
        for _ in range(round(1 / REPORT_SECONDS)):
            crowd.step()
        start = time.perf_counter()
        feed._look(float(second))
        seconds.append(time.perf_counter() - start)
    print(
        f"{len(crowd.links)} workers: snapshot {statistics.median(seconds) * 1e3:.2f} ms, "
        f"now {len(feed._now_event):,} bytes, facts {len(feed._facts_event):,} bytes"
    )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def watch(url: str) -> None:
    async with httpx.AsyncClient(timeout=None) as client, client.stream("GET", f"{url}/cluster/events") as response:
        async for _ in response.aiter_raw():
            pass


async def cpu_by_watchers(url: str, pid: int) -> None:
    """Measure CPU of the router's process by number of watching clients, always including the crowd's reports."""
    for count in (0, 1, 20, 0):
        tasks = [asyncio.create_task(watch(url)) for _ in range(count)]
        await asyncio.sleep(2.0)
        before = cpu_seconds(pid)
        await asyncio.sleep(MEASURED_SECONDS)
        used = (cpu_seconds(pid) - before) / MEASURED_SECONDS
        print(f"{count} watchers: {used * 1e3:.1f} ms of CPU a second")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def frames(url: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.locator(".worker").nth(NUM_PREFILL + NUM_DECODE - 1).wait_for(state="attached")
        time.sleep(5.0)
        found = page.evaluate(FRAMES, MEASURED_SECONDS)
        times = sorted(found["frames"])
        middle, late = times[len(times) // 2], times[len(times) * 99 // 100]
        print(
            f"Chromium without a GPU: {len(times)} frames in {MEASURED_SECONDS:.0f} s, median {middle:.1f} ms, "
            f"99th percentile {late:.1f} ms, longest {times[-1]:.1f} ms; "
            f"tasks over 50 ms: {[round(one) for one in found['long']]}"
        )
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, default=0, metavar="PORT")
    parser.add_argument("--chromium", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return
    asyncio.run(snapshots())
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    router = subprocess.Popen([sys.executable, "-m", "benchmarks.page", "--serve", str(port)])
    try:
        wait_until(lambda: is_ready(url))
        if arguments.chromium:
            frames(url)
        asyncio.run(cpu_by_watchers(url, router.pid))
    finally:
        router.terminate()
        router.wait()


def is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return len(httpx.get(f"{url}/v1/cluster").json()["workers"]) >= NUM_PREFILL + NUM_DECODE
    return False


if __name__ == "__main__":
    main()

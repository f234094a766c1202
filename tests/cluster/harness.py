"""A real cluster of processes for tests: router, prefill and decode workers, optionally the node agent.

Every process is started in its own session and ended by its id, also when a test fails. Ports are picked free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import httpx
import openai

from cli.cluster.ports import free_ports
from common.model_files import resolve_model
from common.text.load import load_tokenizer

if TYPE_CHECKING:
    from tests.engine.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 200.0


def save_with_tokenizer(tiny: TinyModel, folder: Path) -> Path:
    """Write the model with the bytes of dry-run as tokens and another end of sequence."""
    tiny.save(folder)
    tokenizer = load_tokenizer(resolve_model("dry-run"))
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.token_text(258)}))
    return folder


@dataclass
class Service:
    """One process and where its output goes."""

    name: str
    argv: list[str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    program: Sequence[str] = (sys.executable,)  # in front of `argv`

    def start(self, env: dict[str, str]) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.program, *self.argv], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the process (not its children: a rank must notice by itself)."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass
class Cluster:
    """`services` by name: router, agent, prefill-0, decode-0, ..."""

    folder: Path
    url: str
    services: dict[str, Service] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=200.0, **options)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60.0).json()

    def start_service(self, name: str) -> None:
        self.services[name].start(self.env)

    def start_killed(self, num_workers: int) -> None:
        """Start again what tests have killed, until so many workers are ready."""
        for name, service in self.services.items():
            if not service.is_alive():
                self.start_service(name)
        self.wait_ready(num_workers)

    def wait_ready(self, num_workers: int, seconds: float = START_SECONDS) -> None:
        """Until the router is ready and knows `num_workers` usable workers."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/readyz", timeout=10.0).status_code == 200:
                    workers = self.get("/v1/cluster")["workers"]
                    if sum(1 for worker in workers if worker["state"] == "ready") >= num_workers:
                        return
            dead = [s for s in self.services.values() if s.process is not None and not s.is_alive()]
            if dead:
                raise RuntimeError(f"{dead[0].name} ended while starting:\n{dead[0].log()[-3000:]}")
            time.sleep(0.05)
        raise TimeoutError("\n".join(f"--- {s.name}\n{s.log()[-1500:]}" for s in self.services.values()))

    def wait_quiet(self, seconds: float = 100.0) -> list[dict[str, Any]]:
        """Until no worker has a request, a lease or a block in use; returns the workers' state."""
        deadline = time.monotonic() + seconds
        while True:
            workers = [w for w in self.get("/v1/cluster")["workers"] if w["state"] == "ready"]
            loads = [w["load"] for w in workers]
            if workers and all(_is_quiet(load) for load in loads):
                return workers
            if time.monotonic() > deadline:
                raise AssertionError(f"not quiet: {loads}")
            time.sleep(0.05)

    def stop(self) -> None:
        order = sorted(self.services.values(), key=lambda s: s.name != "router")
        for service in order:
            if service.is_alive():
                service.signal(signal.SIGTERM)
        deadline = time.monotonic() + 30.0
        for service in order:
            if service.process is None:
                continue
            try:
                service.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(service.pid, signal.SIGKILL)  # with its rank
                service.process.wait()


def _is_quiet(load: dict[str, Any]) -> bool:
    busy = ("running", "waiting", "swapped", "loading", "leases")
    in_use = load["kv_blocks"] - load["kv_blocks_free"] - load["kv_blocks_cached"]
    return not any(load[name] for name in busy) and in_use == 0


@contextlib.contextmanager
def running_cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    engine_args: Sequence[str] = ("--model=dry-run", "--num-gpu-blocks=512", "--num-threads=1"),
    worker_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
    role_args: Mapping[str, Sequence[str]] = MappingProxyType({}),
    models: Mapping[str, str] = MappingProxyType({}),
    with_agent: bool = False,
) -> Iterator[Cluster]:
    """Start everything, wait until it is ready, and end everything.

    role_args: flags by role, or by the name of a service.
    models: workers that serve another --model than that of `engine_args`, by name.
    """
    with tempfile.TemporaryDirectory(prefix="mini-infer-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        names = [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
        router_port, *ports = free_ports(1 + len(names))
        cluster = Cluster(folder, f"http://127.0.0.1:{router_port}")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        cluster.env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        model = next((a.split("=", 1)[1] for a in engine_args if a.startswith("--model=")), "")

        def add(service: str, argv: list[str]) -> None:
            cluster.services[service] = Service(service, argv, folder / f"{service}.log")

        socket_path = run_dir / "agent.sock"
        if with_agent:
            agent_args = [f"--socket={socket_path}", "--host-tier-gb=0.25"]
            add("agent", ["-m", "kvstore", "--port=0", *agent_args, *role_args.get("agent", ())])
        for worker, port in zip(names, ports, strict=True):
            role = worker.split("-")[0]
            argv = ["-m", f"{role}_service", f"--port={port}", f"--worker-id={worker}", f"--run-dir={run_dir}"]
            if with_agent:
                argv.append(f"--agent-socket={socket_path}")
            other = [f"--model={models[worker]}"] if worker in models else []
            own = (*role_args.get(role, ()), *role_args.get(worker, ()))
            add(worker, [*argv, *engine_args, *other, *worker_args, *own])
        addresses = dict(zip(names, (f"127.0.0.1:{port}" for port in ports), strict=True))
        served = ",".join(dict.fromkeys([model, *models.values()]))
        argv = ["-m", "router", f"--port={router_port}", f"--models={served}" if models else f"--model={model}"]
        for role in ("prefill", "decode"):
            listed = ",".join(address for worker, address in addresses.items() if worker.startswith(role))
            argv.append(f"--{role}={listed}")
        add("router", [*argv, *router_args])
        try:
            for service in cluster.services.values():
                service.start(cluster.env)
                if service.name == "agent":
                    _wait_for_path(socket_path)
            cluster.wait_ready(len(names))
            yield cluster
        finally:
            cluster.stop()


def _wait_for_path(path: Path, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.02)

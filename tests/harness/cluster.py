"""A real cluster of processes for tests: router, prefill and decode workers, optionally the node agent.

Every process has its own session and is ended by its id, also when a test fails. Uses free ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import httpx
import openai

from cli.cluster.ports import free_ports
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from tests.harness.clients import API_KEY, get, openai_client
from tests.harness.forked import fork_service
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from tests.engine.tiny_models import TinyModel
    from tests.engine.transformers_models.hf_families import HfFamily

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 200.0
SHORT_LEASES = ("--kv-lease-seconds=2",)  # for tests that kill readers and wait until their leases have expired


def save_with_tokenizer(tiny: TinyModel | HfFamily, folder: Path) -> Path:
    """Write the model with dry-run's byte tokenizer, but another end of sequence."""
    tiny.save(folder)
    tokenizer = load_tokenizer(resolve_model("dry-run"))
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.token_text(258)}))
    return folder


def service_environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@dataclass
class Service:
    """One process and where its output goes."""

    name: str
    argv: list[str]  # arguments of `python -m`
    log_path: Path
    program: Sequence[str] = ()  # if given, started with `argv` as arguments, instead of a fork
    _process: subprocess.Popen[bytes] | BaseProcess | None = None

    def start(self, env: Mapping[str, str]) -> None:
        if not self.program:
            self._process = fork_service(self.argv, env, self.log_path)
            return
        command = [*self.program, *self.argv]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process is not None and self._exit_code(0.0) is None

    def wait(self, seconds: float) -> int:
        """Wait for the exit code. Raises TimeoutError."""
        code = self._exit_code(seconds)
        if code is None:
            raise TimeoutError(f"{self.name} has not ended:\n{self.log()[-1500:]}")
        return code

    def _exit_code(self, seconds: float) -> int | None:
        """Wait for the exit code; None if the process has not ended in time."""
        assert self._process is not None
        if isinstance(self._process, BaseProcess):
            self._process.join(seconds)
            return self._process.exitcode
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def signal(self, number: int) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the process, but not its children: ranks must notice it themselves."""
        self.signal(signal.SIGKILL)
        self.wait(60.0)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass
class Cluster:
    """A running cluster. services: by name, router, agent, prefill-0, decode-0, ..."""

    folder: Path
    url: str
    services: dict[str, Service] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def client(self) -> openai.OpenAI:
        return openai_client(self.url)

    def ask(
        self, prompt: str | Sequence[int], max_tokens: int = 16, *, model: str = "dry-run", **fields: Any
    ) -> openai.types.Completion:
        """Complete a prompt: greedily and ignoring the end of sequence, unless `fields` of the body say otherwise."""
        body = {"temperature": 0.0, "ignore_eos": True, **fields}
        with self.client() as client:
            return client.completions.create(
                model=model, prompt=[*prompt] if not isinstance(prompt, str) else prompt, max_tokens=max_tokens,
                extra_body=body,
            )  # fmt: skip

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 16, **fields: Any) -> str:
        return self.ask(prompt, max_tokens, **fields).choices[0].text

    def answer(self, text: str, max_tokens: int = 16, **fields: Any) -> str:
        """Return the answer to a message, with the defaults of `ask`."""
        body = {"temperature": 0.0, "ignore_eos": True, **fields}
        with self.client() as client:
            answer = client.chat.completions.create(
                model="dry-run", messages=[{"role": "user", "content": text}], max_tokens=max_tokens, extra_body=body
            )
        return answer.choices[0].message.content or ""

    def complete_all(self, prompts: Sequence[str], max_tokens: int = 16, **fields: Any) -> list[str]:
        """Complete all prompts concurrently."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [*pool.map(lambda prompt: self.complete(prompt, max_tokens, **fields), prompts)]

    def get(self, path: str) -> Any:
        return get(self.url + path, headers={"authorization": f"Bearer {API_KEY}"}).json()

    def legs_of(self, response_id: str) -> list[dict[str, Any]]:
        """Return the workers of a request with one choice, from `GET /explain`."""
        [choice] = self.get(f"/explain/{response_id}")["choices"]
        return choice["workers"]

    def num_migrations(self, response_ids: Iterable[str]) -> int:
        """Return how often choices of these requests migrated to another worker."""
        explained = [self.get(f"/explain/{name}")["choices"] for name in response_ids]
        return sum(choice["migrations"] for choices in explained for choice in choices)

    def load_of(self, worker: str) -> dict[str, Any]:
        return next(state["load"] for state in self.get("/v1/cluster")["workers"] if state["id"] == worker)

    def ready_workers(self) -> set[str]:
        return {found["id"] for found in self.get("/v1/cluster")["workers"] if found["state"] == "ready"}

    def start_service(self, name: str) -> None:
        self.services[name].start(self.env)

    def start_killed(self) -> None:
        """Restart all services that have ended, also drained workers, and wait until all workers are ready."""
        killed = {name for name, service in self.services.items() if not service.is_alive()}
        # Otherwise the router may still count the killed workers as ready.
        wait_until(lambda: not killed & self.ready_workers(), START_SECONDS, self._last_words)
        for name in killed:
            self.start_service(name)
        self.wait_ready(sum(name.startswith(("prefill-", "decode-")) for name in self.services))

    def kill_busiest_decode(self) -> str:
        """SIGKILL the decode worker with the most running rows: cached prompts may draw all streams to one worker.

        Returns its name; empty if there is no decode worker.
        """
        workers = self.get("/v1/cluster")["workers"]
        running = {w["id"]: w["load"]["running"] for w in workers if w["role"] == "decode" and "load" in w}
        name = max(running, key=running.__getitem__, default="")
        if name:
            self.services[name].kill()
        return name

    def wait_ready(self, num_workers: int) -> None:
        """Wait until the router is ready and knows `num_workers` usable workers."""
        wait_until(lambda: self._is_ready(num_workers), START_SECONDS, self._last_words)

    def _is_ready(self, num_workers: int) -> bool:
        ended = [s for s in self.services.values() if s.is_started and not s.is_alive()]
        assert not ended, f"{ended[0].name} ended while starting:\n{ended[0].log()[-3000:]}"
        with contextlib.suppress(httpx.HTTPError):
            is_ready = get(self.url + "/readyz").status_code == 200
            return is_ready and metric(self.url, r'mini_infer_workers\{.*state="ready".*\}') >= num_workers
        return False

    def _last_words(self) -> str:
        return "\n".join(f"--- {s.name}\n{s.log()[-1500:]}" for s in self.services.values())

    def wait_quiet(self) -> list[dict[str, Any]]:
        """Wait until no worker has a request, a lease or a block in use; return the state of all ready workers."""
        workers: list[dict[str, Any]] = []

        def is_quiet() -> bool:
            workers[:] = [found for found in self.get("/v1/cluster")["workers"] if found["state"] == "ready"]
            return bool(workers) and all(_is_quiet(found["load"]) for found in workers)

        wait_until(is_quiet, message=lambda: workers)
        return workers

    def stop(self) -> None:
        order = sorted(self.services.values(), key=lambda s: s.name != "router")
        for service in order:
            service.signal(signal.SIGTERM)
        deadline = time.monotonic() + 30.0
        for service in filter(lambda service: service.is_started, order):
            try:
                service.wait(max(deadline - time.monotonic(), 0.1))
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(service.pid, signal.SIGKILL)  # with its engine process
                service.wait(60.0)


def blocks_in_use(load: Mapping[str, int]) -> int:
    return load["kv_blocks"] - load["kv_blocks_free"] - load["kv_blocks_cached"]


def _is_quiet(load: Mapping[str, int]) -> bool:
    return not any(load[name] for name in ("running", "waiting", "swapped", "loading", "leases")) and (
        blocks_in_use(load) == 0
    )


def metric(url: str, series: str) -> float:
    """Sum up a service's samples whose names and labels match the regular expression `series`."""
    text = get(f"{url}/metrics", headers={"authorization": f"Bearer {API_KEY}"}).text
    return sum(map(float, re.findall(rf"^{series} (\S+)$", text, re.MULTILINE)))


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
    models: the --model of each worker that serves another one than `engine_args` say, by name.
    """
    with tempfile.TemporaryDirectory(prefix="mini-infer-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        names = [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
        router_port, *ports = free_ports(1 + len(names))
        cluster = Cluster(folder, f"http://127.0.0.1:{router_port}")
        cluster.env = service_environment()
        model = next((a.split("=", 1)[1] for a in engine_args if a.startswith("--model=")), "")

        def add(service: str, argv: list[str]) -> None:
            cluster.services[service] = Service(service, argv, folder / f"{service}.log")

        socket_path = run_dir / "agent.sock"
        if with_agent:
            agent_args = [f"--socket={socket_path}", "--host-tier-gb=0.25"]
            add("agent", ["kvstore", "--port=0", *agent_args, *role_args.get("agent", ())])
        for worker, port in zip(names, ports, strict=True):
            role = worker.split("-")[0]
            argv = [f"{role}_service", f"--port={port}", f"--worker-id={worker}", f"--run-dir={run_dir}"]
            if with_agent:
                argv.append(f"--agent-socket={socket_path}")
            other_model = [f"--model={models[worker]}"] if worker in models else []
            own_args = (*role_args.get(role, ()), *role_args.get(worker, ()))
            add(worker, [*argv, *engine_args, *other_model, *worker_args, *own_args])
        addresses = dict(zip(names, (f"127.0.0.1:{port}" for port in ports), strict=True))
        served = ",".join(dict.fromkeys([model, *models.values()]))
        argv = ["router", f"--port={router_port}", f"--models={served}" if models else f"--model={model}"]
        for role in ("prefill", "decode"):
            listed = ",".join(address for worker, address in addresses.items() if worker.startswith(role))
            argv.append(f"--{role}={listed}")
        add("router", [*argv, *router_args])
        try:
            for service in cluster.services.values():
                service.start(cluster.env)
                if service.name == "agent":
                    wait_until(socket_path.exists)
            cluster.wait_ready(len(names))
            yield cluster
        finally:
            cluster.stop()

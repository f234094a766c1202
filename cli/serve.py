"""`mini-infer serve`: a whole cluster on this machine as child processes, from one command to Ctrl-C.

Turns flags and environment into a `ClusterConfig`, checks what can be checked before anything starts, and
hands the plan to the supervisor. Knows nothing of HTTP, models or tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cli.cluster import ClusterConfig, ServeConfig, addresses, plan_cluster
from cli.gpus import Gpus, find_gpus, uses_gpu
from cli.model_size import weight_bytes
from cli.placement import choose_workers
from cli.ports import LOOPBACK, check_port, free_ports
from cli.progress import StartDisplay
from cli.run_directory import run_directory
from cli.supervisor import StartError, Supervisor
from common.config import ENV_PREFIX, SettingsParser, add_arguments, from_namespace, misspelt_variables
from common.errors import ConfigError
from common.logging import write_line
from common.model_files import DRY_RUN_MODEL_NAME, resolve_model
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from kvstore.config import AgentConfig
from router.config import HttpConfig, RouterConfig
from worker.config import WorkerConfig

T = TypeVar("T")

# A later group takes over the flags that it shares with an earlier one.
GROUPS: tuple[tuple[str, type[Any]], ...] = (
    ("node agent", AgentConfig),
    ("workers", WorkerConfig),
    ("HTTP connections", HttpConfig),
    ("router and HTTP gateway", RouterConfig),
    ("GPU of each worker", GpuConfig),
    ("engine of each worker", EngineConfig),
    ("cluster", ServeConfig),
)
# Fields that the cluster sets itself, or that another class has under the same name: no flag and no variable.
SET_BY_CLUSTER: dict[type[Any], tuple[str, ...]] = {
    AgentConfig: ("host", "port", "socket", "cluster_token", "metrics_port", "drain_grace_seconds"),
    WorkerConfig: ("host", "port", "worker_id", "advertise_host", "run_dir", "agent_socket", "metrics_port"),
    RouterConfig: ("prefill", "decode", "model", "models", "cluster_token", "metrics_port", "drain_grace_seconds"),
    EngineConfig: ("host_tier_gb",),
}
QUANT_MODE_HELP = {
    "w8a16": "int8-weight",
    "int8": "int8-weight",
    "gptq": "auto, which keeps what a checkpoint has",
    "awq": "auto, which keeps what a checkpoint has",
    "fp16": "none, with --dtype float16",
}
INSTEAD_OF_VLLM = {
    "--data-parallel-size": "use --decode, the number of workers",
    "--quantization": "use --quant-mode",
    "--enforce-eager": "use --no-use-cuda-graph",
    "--swap-space": "use --preemption swap and --host-tier-gb",
    "--speculative-config": "use --num-speculative-tokens",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--trust-remote-code": "code of a checkpoint is never run",
}
FAILED_START_GRACE_SECONDS = 3.0


def build_parser(prog: str = "mini-infer serve") -> argparse.ArgumentParser:
    """All flags of `serve`: its own, the engine's, the router's, the workers' and the agent's."""
    parser = SettingsParser(prog=prog, description=ServeConfig.__doc__, conflict_handler="resolve")
    parser.instead = INSTEAD_OF_VLLM
    for title, cls in GROUPS:
        add_arguments(parser.add_argument_group(title), cls, without=SET_BY_CLUSTER.get(cls, ()))
    return parser


def parse_config(
    argv: Sequence[str],
    env: Mapping[str, str],
    find: Callable[[str], Gpus] = lambda device: Gpus(),
    notes: list[str] | None = None,
) -> ClusterConfig:
    """Flags first, then MINI_INFER_* variables, then what suits the GPUs. Raises ConfigError.

    find: the GPUs for a --device. notes: takes a line on what was chosen.
    """
    known_modes = next(f for f in dataclasses.fields(EngineConfig) if f.name == "quant_mode").metadata["choices"]
    check_quant_mode(argv, env, known_modes)
    namespace = build_parser().parse_args(argv)

    def settings(cls: type[T], **given: Any) -> T:
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        fixed = {name: defaults[name] for name in SET_BY_CLUSTER.get(cls, ())} | given
        return from_namespace(cls, namespace, env, fixed)

    serve = settings(ServeConfig)
    if serve.ep > 1:
        if getattr(namespace, "tp", serve.ep) != serve.ep:
            raise ConfigError(f"--ep {serve.ep} --tp {namespace.tp}: both are the ranks of a worker; give one")
        engine = settings(EngineConfig, tp=serve.ep, expert_parallel=True)
    else:
        engine = settings(EngineConfig)
    if serve.dry_run:
        engine = dataclasses.replace(engine, model=DRY_RUN_MODEL_NAME)
    gpus = find(engine.device)
    is_tp_given = serve.ep > 1 or hasattr(namespace, "tp") or f"{ENV_PREFIX}TP" in env
    workers = choose_workers(
        None if serve.prefill < 0 else serve.prefill,
        None if serve.decode < 0 else serve.decode,
        engine.num_ranks if is_tp_given or engine.pp > 1 or not gpus.names else None,
        gpus,
        weight_bytes(engine) if gpus.names else 0,
    )
    if notes is not None and workers.reason:
        notes.append(workers.reason)
    serve = dataclasses.replace(serve, prefill=workers.prefill, decode=workers.decode)
    engine = engine if engine.pp > 1 else dataclasses.replace(engine, tp=workers.tp)
    router_port, agent_port, *worker_ports = free_ports(2 + serve.prefill + serve.decode)
    prefill_ports, decode_ports = worker_ports[: serve.prefill], worker_ports[serve.prefill :]
    router = settings(
        RouterConfig, model=engine.model, prefill=addresses(prefill_ports), decode=addresses(decode_ports)
    )
    return ClusterConfig(
        serve=serve,
        router=router if router.port else dataclasses.replace(router, port=router_port),
        http=settings(HttpConfig),
        worker=settings(WorkerConfig),
        engine=engine,
        gpu=settings(GpuConfig),
        agent=settings(AgentConfig),
        agent_port=agent_port,
        prefill_ports=tuple(prefill_ports),
        decode_ports=tuple(decode_ports),
        gpus=gpus.names,
    )


def check_quant_mode(argv: Sequence[str], env: Mapping[str, str], known: Sequence[str]) -> None:
    """A mode of other programs gets an answer that names ours. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quant-mode", default=env.get(ENV_PREFIX + "QUANT_MODE", ""))
    mode = parser.parse_known_args(argv)[0].quant_mode
    if mode and mode not in known:
        instead = f"use {QUANT_MODE_HELP[mode]}" if mode in QUANT_MODE_HELP else f"choose one of {', '.join(known)}"
        raise ConfigError(f"--quant-mode {mode} is not available: {instead}")


def run(argv: Sequence[str]) -> int:
    """The command. Exit code 0 after Ctrl-C or SIGTERM; errors are raised."""
    notes: list[str] = []
    config = parse_config(argv, os.environ, lambda device: find_gpus(device, os.environ), notes)
    check_ports(config)
    model = resolve_model(config.engine.model)
    for line in misspelt_variables(os.environ, *(cls for _, cls in GROUPS)):
        print(f"note: {line}", file=sys.stderr)
    if "--use-cuda-graph" in argv and not uses_gpu(config.engine.device):
        print("note: --use-cuda-graph has no effect on a CPU", file=sys.stderr)
    with run_directory() as run_dir:
        specs = plan_cluster(
            config,
            run_dir=run_dir,
            env=os.environ,
            token=secrets.token_hex(16),
        )
        display = StartDisplay([spec.name for spec in specs], config.serve.verbose, config.worker.log_format)
        for line in placement_lines(config, notes):
            display.tell(line)
        supervisor = Supervisor(
            specs,
            display.line,
            display.state,
            exit_on_failure=config.serve.exit_on_failure,
            on_status=display.status,
        )
        asyncio.run(_serve(supervisor, display, ready_message(config, model.name)))
    return 0


def check_ports(config: ClusterConfig) -> None:
    """Raise ConfigError for a port that another program has, or that the cluster needs twice."""
    check_port(config.router.host, config.router.port)
    for name, port in config.metrics_ports.items():
        if port == config.router.port:
            raise ConfigError(f"--metrics-port gives {name} port {port}, which is the router's: choose another")
        of_router = config.router.metrics_host or config.router.host
        check_port(of_router if name == "router" else LOOPBACK, port, "--metrics-port")


def placement_lines(config: ClusterConfig, notes: Sequence[str]) -> list[str]:
    """Which worker takes which GPUs, and why there are so many; nothing on a CPU."""
    pairs = zip(config.workers, config.placements, strict=False)
    lines = [f"{name} on GPU {', '.join(placement.gpus)}" for (_, name, _), placement in pairs]
    why = [f"{'; '.join(notes)} (--prefill, --decode and --tp override)"] if lines and notes else []
    return lines + why


def workers_of(config: ClusterConfig) -> str:
    """Number of workers by role."""
    return f"{config.serve.prefill} prefill, {config.serve.decode} decode"


def ready_message(config: ClusterConfig, model_name: str) -> str:
    """The message with the cluster's address and a command to try."""
    name = config.router.served_model_name or model_name
    # Bounded: a small model that misses its end would go on until its context is full.
    messages = '[{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{name}", "max_tokens": 100, "messages": {messages}}}'
    key = " -H 'Authorization: Bearer '$MINI_INFER_API_KEY" if config.router.api_key else ""
    ports = "".join(f", {service} on :{port}" for service, port in config.metrics_ports.items())
    metrics = f"metrics: {config.url}/metrics{ports}\n" if ports else ""
    curl = f"curl {config.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    return f"{name} on {config.url} ({workers_of(config)})\n{metrics}try: {curl}\nstop with Ctrl-C"


async def _serve(supervisor: Supervisor, display: StartDisplay, message: str) -> None:
    stopping = asyncio.Event()
    starting: asyncio.Task[None] | None = None

    def on_signal() -> None:
        if stopping.is_set():  # asked twice: now
            supervisor.kill()
        stopping.set()
        if starting is not None:
            starting.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    grace_seconds = FAILED_START_GRACE_SECONDS
    try:
        with display:
            starting = asyncio.create_task(supervisor.start())
            await asyncio.wait([starting])
            error = None if starting.cancelled() else starting.exception()
            if isinstance(error, StartError):
                display.reveal(error.name, error.tail)
        if not starting.cancelled():
            starting.result()
            grace_seconds = float("inf")
            write_line(f"ready in {display.elapsed_seconds:.1f} s: {message}", sys.stdout)
            await supervisor.run(stopping)
            display.tell("stopping: open requests may finish; Ctrl-C again ends them")
    finally:
        await supervisor.stop(grace_seconds)

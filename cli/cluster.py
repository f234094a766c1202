"""Which services make a local cluster, and with which flags. Pure: settings in, `ServiceSpec`s out.

Knows the settings classes of all services; starts nothing and picks no port.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.child import child_command
from cli.gpus import VISIBLE, visible_order, workers_on_same_gpu
from cli.ports import LOOPBACK
from cli.service import ServiceSpec
from common.config import ENV_PREFIX, setting, to_argv
from common.errors import ConfigError
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from engine.worker.config import WorkerConfig
from kvstore.config import AgentConfig
from router.config import HttpConfig, RouterConfig

SECRETS = ("cluster_token", "api_key")  # passed by environment: a command line is readable by every user


@dataclass(frozen=True)
class ServeConfig:
    """Start a whole cluster on this machine: router, prefill and decode workers, node agent."""

    prefill: int = setting(1, "prefill workers; 0: decode workers compute prompts too")
    decode: int = setting(1, "decode workers")
    tp: int = setting(1, "GPUs of one worker, tensor parallel")
    ep: int = setting(1, "GPUs of one worker, expert parallel")
    dry_run: bool = setting(False, "a tiny random model, no files needed; the same as --model dry-run")
    verbose: bool = setting(False, "show the services' logs while they start")

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 1:
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode}: at least one decode worker is needed "
                "(it computes prompts too when there is no prefill worker)"
            )
        for flag, value in (("--tp", self.tp), ("--ep", self.ep)):
            if value != 1:
                raise ConfigError(f"{flag} {value}: one GPU per worker for now; use {flag} 1 and more workers")


@dataclass(frozen=True)
class ClusterConfig:
    """The settings of all services of one cluster, and the loopback ports that they will use."""

    serve: ServeConfig
    router: RouterConfig
    http: HttpConfig
    worker: WorkerConfig
    engine: EngineConfig
    gpu: GpuConfig
    agent: AgentConfig
    agent_port: int
    prefill_ports: tuple[int, ...]
    decode_ports: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        return self.serve.prefill + self.serve.decode


def addresses(ports: Sequence[int]) -> str:
    """Loopback addresses as a router's flag lists them."""
    return ",".join(f"{LOOPBACK}:{port}" for port in ports)


def plan_cluster(
    config: ClusterConfig,
    run_dir: Path,
    env: Mapping[str, str],
    token: str,
    gpus: Sequence[str] = (),
) -> list[ServiceSpec]:
    """The services of the cluster. `token` is the secret that they will share.

    gpus: names of those that workers take in turn. Workers of one GPU share `--gpu-memory-fraction` equally.
    """
    secrets = {"cluster_token": token, "api_key": config.router.api_key}
    agent_socket = run_dir / "agent.sock"

    def spec(
        name: str, module: str, settings: Sequence[Any], health: str, visible: str = "", **stages: Any
    ) -> ServiceSpec:
        argv = tuple(flag for part in settings for flag in to_argv(_without_secrets(part)))
        own = {VISIBLE: visible} if visible else {}
        return ServiceSpec(name, child_command(module, argv), health, env=_child_env(env, secrets) | own, **stages)

    agent = dataclasses.replace(config.agent, host=LOOPBACK, port=config.agent_port, socket=str(agent_socket))
    services = [spec("agent", "kvstore", [agent], f"{LOOPBACK}:{config.agent_port}", stage=0, stop_stage=2)]
    grace = config.worker.drain_grace_seconds + 5.0
    index = 0  # of a worker, over both roles
    for role, ports in (("prefill", config.prefill_ports), ("decode", config.decode_ports)):
        for number, port in enumerate(ports):
            gpu, visible = _gpu_of(config, index, list(gpus))
            index += 1
            worker = dataclasses.replace(
                config.worker,
                host=LOOPBACK,
                port=port,
                worker_id=f"{role}-{number}",
                run_dir=str(run_dir),
                agent_socket=str(agent_socket),
            )
            health = f"{LOOPBACK}:{port}"
            stages = {"stage": 1, "stop_stage": 1, "grace_seconds": grace}
            settings = [worker, config.engine, gpu]
            services.append(spec(worker.worker_id, f"{role}_service", settings, health, visible, **stages))
    router = config.router
    host = LOOPBACK if router.host in ("0.0.0.0", "") else router.host
    health = f"http://{host}:{router.port}/readyz"
    services.append(
        spec("router", "router", [router, config.http], health, stage=1, stop_stage=0, grace_seconds=grace)
    )
    return services


def _gpu_of(config: ClusterConfig, worker: int, gpus: list[str]) -> tuple[GpuConfig, str]:
    """GPU settings of a worker, and what it sees."""
    if not gpus:
        return config.gpu, ""
    sharing = workers_on_same_gpu(len(gpus), worker, config.num_workers)
    fraction = round(config.gpu.gpu_memory_fraction / sharing, 4)
    return dataclasses.replace(config.gpu, gpu_memory_fraction=fraction), visible_order(gpus, worker)


def _without_secrets(settings: Any) -> Any:
    names = {field.name for field in dataclasses.fields(settings)} & set(SECRETS)
    return dataclasses.replace(settings, **dict.fromkeys(names, ""))


def _child_env(env: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Our own settings are on the command line by now; left in the environment they would override defaults."""
    kept = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}
    root = str(Path(__file__).resolve().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH", "")])])
    kept["PYTHONUNBUFFERED"] = "1"
    return kept | {ENV_PREFIX + name.upper(): value for name, value in secrets.items() if value}

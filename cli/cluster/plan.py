"""Plan of a local cluster: its services and their flags. Pure: takes settings, returns `ServiceSpec`s.

Knows the settings classes of all services; starts nothing and picks no port.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.cluster.child import child_command, child_environment
from cli.cluster.ports import LOOPBACK
from cli.cluster.service import ServiceSpec
from common.config import ENV_PREFIX, Settings, setting, to_argv, with_wings
from common.errors import ConfigError
from common.net.hosts import with_port
from engine.config import EngineConfig, GpuConfig
from router.config import HttpConfig, RouterConfig
from worker.config import WorkerConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
SECRETS = ("cluster_token", "api_key")  # passed by environment: every user can read a command line


@with_wings("cli", "serve_settings")
@dataclass(frozen=True)
class ServeConfig(Settings):
    """Start a whole cluster on this machine: router, prefill and decode workers, node agent."""

    prefill: int = setting(
        -1, "prefill workers; 0: decode workers compute prompts too; -1: one on a CPU, none on GPUs"
    )
    decode: int = setting(-1, "decode workers; -1: one on a CPU, on GPUs as many as they hold")
    dry_run: bool = setting(False, "a tiny random model, no files needed; the same as --model dry-run")
    verbose: bool = setting(False, "show the services' logs while they start")

    def __post_init__(self) -> None:
        if self.prefill < -1 or self.decode < -1 or self.decode == 0:
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode}: at least one decode worker is needed "
                "(it computes prompts too when there is no prefill worker)"
            )
        self.check_together()


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One worker and its part of this machine. visible: its `gpus`, then the others, whose pools it can map."""

    role: str
    name: str
    port: int  # of gRPC
    engine: EngineConfig
    gpu: GpuConfig
    gpus: tuple[str, ...] = ()
    visible: str = ""


@dataclass(frozen=True)
class ClusterConfig:
    """Settings of all services of one cluster, and the loopback ports that they will use.

    agent: the node agent, if there is one (`cli/host_tier`). workers: prefill workers first.
    """

    serve: ServeConfig
    router: RouterConfig
    http: HttpConfig
    worker: WorkerConfig
    engine: EngineConfig
    agent: Any
    workers: tuple[LocalWorker, ...]
    metrics_ports: Mapping[str, int]  # by service; empty: none
    why_these_workers: str = ""  # why this many workers and ranks, if no flag gave the numbers

    @property
    def url(self) -> str:
        """URL of the router, on this machine."""
        host = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}.get(self.router.host, self.router.host)
        return f"http://{with_port(host, self.router.port)}"


def workers_of(config: ClusterConfig) -> str:
    """Describe the number of workers of each role."""
    return f"{config.serve.prefill} prefill, {config.serve.decode} decode"


def plan_cluster(config: ClusterConfig, run_dir: Path, env: Mapping[str, str], token: str) -> list[ServiceSpec]:
    """Plan the services of the cluster. token: the secret that they share, unless the settings have one."""
    secrets = {"cluster_token": config.worker.cluster_token or token, "api_key": config.router.api_key}
    plan = Plan(config, run_dir, env, secrets)
    agent = [config.agent.spec(plan)] if config.agent else []
    return [*agent, *map(plan.worker, config.workers), plan.router()]


@dataclass(frozen=True)
class Plan:
    """Plans each service from what they have in common. The router stops first, then workers."""

    config: ClusterConfig
    run_dir: Path
    env: Mapping[str, str]
    secrets: Mapping[str, str]

    def worker(self, worker: LocalWorker) -> ServiceSpec:
        config, name = self.config, worker.name
        settings = dataclasses.replace(
            config.worker,
            host=LOOPBACK,
            port=worker.port,
            worker_id=name,
            run_dir=str(self.run_dir),
            agent_socket=config.agent.socket(self.run_dir) if config.agent else "",
            **self._metrics_port(name),
        )
        file_fields = [field.name for field in dataclasses.fields(config.engine) if field.metadata["per_worker"]]
        files: dict[str, Any] = {
            field: f"{path}.{name}" for field in file_fields if (path := getattr(config.engine, field))
        }
        engine = dataclasses.replace(worker.engine, **files)
        return self.spec(
            name,
            f"{worker.role}_service",
            [settings, engine, worker.gpu],
            f"{LOOPBACK}:{worker.port}",
            visible=worker.visible,
            status_socket=str(self.run_dir / f"{name}.status"),
            stop_stage=1,
            grace_seconds=self._grace_seconds,
        )

    def router(self) -> ServiceSpec:
        config = self.config
        router = dataclasses.replace(config.router, **self._metrics_port("router"))
        settings, health = [router, config.http], f"{config.url}/readyz"
        return self.spec("router", "router", settings, health, stop_stage=0, grace_seconds=self._grace_seconds)

    def _metrics_port(self, name: str) -> dict[str, Any]:
        """Return the setting of a service's metrics port, if it has one."""
        ports = self.config.metrics_ports
        return {"metrics_port": ports[name]} if name in ports else {}

    @property
    def _grace_seconds(self) -> float:
        return self.config.worker.drain_grace_seconds + 5.0

    def spec(
        self, name: str, module: str, settings: Sequence[Any], health: str, visible: str = "", **stages: Any
    ) -> ServiceSpec:
        """Return the spec of a service with these settings. visible: its GPUs; stages: further fields of the spec."""
        public = [dataclasses.replace(part, **dict.fromkeys(_secrets_of(part), "")) for part in settings]
        argv = tuple(flag for part in public for flag in to_argv(part))
        env = _child_env(self.env, settings, self.secrets) | ({VISIBLE: visible} if visible else {})
        return ServiceSpec(name, child_command(module, argv), health, env=env, **stages)


def _secrets_of(settings: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)} & set(SECRETS)


def _child_env(env: Mapping[str, str], settings: Sequence[Any], secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a service, with only those secrets that it has a setting for.

    Our own settings are on the command line; variables left in the environment would override its defaults.
    """
    inherited = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}
    needed = {name: secrets[name] for part in settings for name in _secrets_of(part)}
    secret_variables = {ENV_PREFIX + name.upper(): value for name, value in needed.items() if value}
    return child_environment(inherited) | {"PYTHONUNBUFFERED": "1"} | secret_variables

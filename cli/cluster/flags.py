"""Reads flags and environment of `mini-infer serve` into one `ClusterConfig`. Picks, checks ports; starts nothing."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cli.cluster.plan import ClusterConfig, LocalWorker, ServeConfig
from cli.cluster.ports import LOOPBACK, check_port, free_ports
from common.config import SettingsParser, add_arguments, from_namespace
from common.model_files import DRY_RUN_MODEL_NAME
from common.wings import call_wing, from_wing, has_wing
from engine.config import EngineConfig, GpuConfig
from router.config import ROLES, HttpConfig, RouterConfig
from worker.config import WorkerConfig

T = TypeVar("T")

# A flag that two groups share belongs to the later one.
GROUPS: tuple[tuple[str, type[Any]], ...] = (
    ("workers", WorkerConfig),
    ("HTTP connections", HttpConfig),
    ("router and HTTP gateway", RouterConfig),
    ("GPU of each worker", GpuConfig),
    ("engine of each worker", EngineConfig),
    ("cluster", ServeConfig),
)
# Fields without flag and variable: the cluster sets them itself, or another class has a field of the same name.
SET_BY_CLUSTER: dict[type[Any], tuple[str, ...]] = {
    WorkerConfig: ("host", "port", "worker_id", "advertise_host", "run_dir", "agent_socket", "metrics_port"),
    RouterConfig: ("prefill", "decode", "model", "models", "cluster_token", "metrics_port", "drain_grace_seconds"),
}
HAS_GPUS = has_wing("cli.gpus")
if HAS_GPUS:
    from cli.gpus.workers import engine_settings_of_ep, fit_to_gpus, placed
HAS_AGENT = has_wing("cli.host_tier")
if HAS_AGENT:
    from cli.host_tier.node_agent import OWN_FIELDS, node_agent
    from kvstore.tier.settings import AgentConfig

    GROUPS = (("node agent", AgentConfig), *GROUPS)
    SET_BY_CLUSTER |= {AgentConfig: OWN_FIELDS, EngineConfig: ("host_tier_gb",)}


def build_parser(prog: str = "mini-infer serve") -> argparse.ArgumentParser:
    """Build the parser of all flags of `serve`: its own, the engine's, the router's, the workers' and the agent's."""
    parser = SettingsParser(prog=prog, description=ServeConfig.__doc__, conflict_handler="resolve")
    parser.instead = from_wing("cli.hints.vllm:INSTEAD_OF_VLLM") or {}
    for title, cls in GROUPS:
        add_arguments(parser.add_argument_group(title), cls, without=SET_BY_CLUSTER.get(cls, ()))
    return parser


def parse_config(
    argv: Sequence[str], env: Mapping[str, str], find_gpus: Callable[[str], Sequence[str]] | None = None
) -> ClusterConfig:
    """Take settings from flags, then MINI_INFER_* variables, then what suits the GPUs of the --device.

    find_gpus: from a device to its GPUs; None: workers run on the CPU. Raises ConfigError.
    """
    call_wing("cli.hints.vllm:check_quant_mode", argv, env)
    namespace = build_parser().parse_args(argv)

    def settings(cls: type[T], **values: Any) -> T:
        own = SET_BY_CLUSTER.get(cls, ())
        fixed = {field.name: field.default for field in dataclasses.fields(cls) if field.name in own}  # type: ignore[arg-type]
        return from_namespace(cls, namespace, env, fixed | values)

    serve, gpu = settings(ServeConfig), settings(GpuConfig)
    engine = settings(EngineConfig, **(engine_settings_of_ep(serve, namespace) if HAS_GPUS else {}))
    if serve.dry_run:
        engine = dataclasses.replace(engine, model=DRY_RUN_MODEL_NAME)
    gpus = find_gpus(engine.device) if find_gpus else ()
    why = ""
    if HAS_GPUS:
        serve, engine, why = fit_to_gpus(serve, engine, gpus, namespace, env)
    prefill, decode = (1 if count < 0 else count for count in (serve.prefill, serve.decode))
    serve = dataclasses.replace(serve, prefill=prefill, decode=decode)
    router_port, agent_port, *ports = free_ports(2 + prefill + decode)
    if not HAS_GPUS:  # all workers share the first GPU, if there is one
        gpu = dataclasses.replace(gpu, gpu_memory_fraction=round(gpu.gpu_memory_fraction / len(ports), 4))
    workers = [
        LocalWorker(role, f"{role}-{number}", port, engine, gpu)
        for role, role_ports in (("prefill", ports[:prefill]), ("decode", ports[prefill:]))
        for number, port in enumerate(role_ports)
    ]
    if HAS_GPUS:
        workers = placed(workers, serve, gpus)
    addresses = {role: ",".join(f"{LOOPBACK}:{each.port}" for each in workers if each.role == role) for role in ROLES}
    router = settings(RouterConfig, model=engine.model, **addresses)
    agent = node_agent(settings(AgentConfig), agent_port) if HAS_AGENT else None
    names = [*(worker.name for worker in workers), *(["agent"] if agent else []), "router"]
    return ClusterConfig(
        serve=serve,
        router=router if router.port else dataclasses.replace(router, port=router_port),
        http=settings(HttpConfig),
        worker=settings(WorkerConfig),
        engine=engine,
        agent=agent,
        workers=tuple(workers),
        metrics_ports=call_wing("cli.metrics_port.ports:metrics_ports", serve, names) or {},
        why_these_workers=why,
    )


def check_ports(config: ClusterConfig) -> None:
    """Raise ConfigError for a port that another program uses, or that the cluster needs twice."""
    check_port(config.router.host, config.router.port)
    call_wing("cli.metrics_port.ports:check_metrics_ports", config)

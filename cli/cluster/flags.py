"""Flags and environment of `mini-infer serve`, as one `ClusterConfig`. Starts nothing; picks ports that are free."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cli.cluster.placement import choose_workers
from cli.cluster.plan import ClusterConfig, ServeConfig, addresses
from cli.cluster.ports import free_ports
from common.config import ENV_PREFIX, SettingsParser, add_arguments, from_namespace
from common.errors import ConfigError
from common.model_files import DRY_RUN_MODEL_NAME
from common.wings import from_wing, has_wing
from engine.config import EngineConfig, GpuConfig
from router.config import HttpConfig, RouterConfig
from worker.config import WorkerConfig

T = TypeVar("T")

# A later group takes over the flags that it shares with an earlier one.
GROUPS: tuple[tuple[str, type[Any]], ...] = (
    ("workers", WorkerConfig),
    ("HTTP connections", HttpConfig),
    ("router and HTTP gateway", RouterConfig),
    ("GPU of each worker", GpuConfig),
    ("engine of each worker", EngineConfig),
    ("cluster", ServeConfig),
)
# Fields that the cluster sets itself, or that another class has under the same name: no flag and no variable.
SET_BY_CLUSTER: dict[type[Any], tuple[str, ...]] = {
    WorkerConfig: ("host", "port", "worker_id", "advertise_host", "run_dir", "agent_socket", "metrics_port"),
    RouterConfig: ("prefill", "decode", "model", "models", "cluster_token", "metrics_port", "drain_grace_seconds"),
    EngineConfig: ("host_tier_gb",),
}
HAS_HINTS = has_wing("cli.hints")
if HAS_HINTS:
    from cli.hints.vllm import INSTEAD_OF_VLLM, check_quant_mode
HAS_AGENT = has_wing("kvstore.tier")
if HAS_AGENT:
    from kvstore.tier.settings import AgentConfig

    GROUPS = (("node agent", AgentConfig), *GROUPS)
    SET_BY_CLUSTER[AgentConfig] = "host", "port", "socket", "cluster_token", "metrics_port", "drain_grace_seconds"


def build_parser(prog: str = "mini-infer serve") -> argparse.ArgumentParser:
    """All flags of `serve`: its own, the engine's, the router's, the workers' and the agent's."""
    parser = SettingsParser(prog=prog, description=ServeConfig.__doc__, conflict_handler="resolve")
    if HAS_HINTS:
        parser.instead = INSTEAD_OF_VLLM
    for title, cls in GROUPS:
        add_arguments(parser.add_argument_group(title), cls, without=SET_BY_CLUSTER.get(cls, ()))
    return parser


def parse_config(
    argv: Sequence[str], env: Mapping[str, str], find_gpus: Callable[[str], Sequence[str]] = lambda device: ()
) -> ClusterConfig:
    """Flags first, then MINI_INFER_* variables, then what suits the GPUs that there are for a --device.

    Raises ConfigError.
    """
    if HAS_HINTS:
        check_quant_mode(argv, env)
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
    gpus = find_gpus(engine.device)
    is_tp_given = serve.ep > 1 or hasattr(namespace, "tp") or f"{ENV_PREFIX}TP" in env
    serve, engine, why = _fit_to_gpus(serve, engine, gpus, is_tp_given)
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
        agent=settings(AgentConfig) if HAS_AGENT else None,
        agent_port=agent_port,
        prefill_ports=tuple(prefill_ports),
        decode_ports=tuple(decode_ports),
        gpus=tuple(gpus),
        why_these_workers=why,
    )


def _fit_to_gpus(
    serve: ServeConfig, engine: EngineConfig, gpus: Sequence[str], is_tp_given: bool
) -> tuple[ServeConfig, EngineConfig, str]:
    """Fill in how many workers of how many ranks there are, where that is not given; and why."""
    reasons = []
    if gpus and not is_tp_given and engine.pp == 1 and (choose_tp := from_wing("cli.sizing.ranks:choose_tp")):
        tp, reason = choose_tp(engine, len(gpus))
        engine = dataclasses.replace(engine, tp=tp)
        reasons.append(reason)
    prefill, decode, reason = choose_workers(serve.prefill, serve.decode, engine.num_ranks, len(gpus))
    serve = dataclasses.replace(serve, prefill=prefill, decode=decode)
    return serve, engine, "; ".join(filter(None, [*reasons, reason]))

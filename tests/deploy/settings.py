"""The settings classes that each service reads: deployment files are parsed with them, as the service would."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from common.config import ENV_PREFIX, add_arguments, from_namespace
from engine.config import EngineConfig, GpuConfig
from kvstore.tier.settings import AgentConfig
from router.config import HttpConfig, RouterConfig
from worker.config import WorkerConfig

SETTINGS: dict[str, tuple[type[Any], ...]] = {
    "router": (RouterConfig, HttpConfig),
    "prefill_service": (WorkerConfig, EngineConfig, GpuConfig),
    "decode_service": (WorkerConfig, EngineConfig, GpuConfig),
    "kvstore": (AgentConfig,),
}
VARIABLES = {
    ENV_PREFIX + field.name.upper()
    for classes in SETTINGS.values()
    for cls in classes
    for field in dataclasses.fields(cls)
}


def parse(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Parse all settings of the service that `command` starts. Fails for an unknown flag and for a bad value."""
    module, *argv = command
    parser = argparse.ArgumentParser(exit_on_error=False)
    for cls in SETTINGS[module]:
        add_arguments(parser, cls)
    namespace = parser.parse_args(argv)
    values: dict[str, Any] = {}
    for cls in SETTINGS[module]:
        values |= dataclasses.asdict(from_namespace(cls, namespace, env))
    return values

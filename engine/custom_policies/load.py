"""Load a user's scheduling policy, and try it before it is needed."""

from __future__ import annotations

import importlib

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.custom_policies.guarded import GuardedOrder, checked_key
from engine.custom_policies.settings import PolicySettings
from engine.scheduling.order import ServiceOrder
from engine.scheduling.policy import EngineView, RequestView, SchedulingPolicy


def order_of(config: EngineConfig) -> ServiceOrder | None:
    """The order of service that `--scheduling-policy` names. Raises ConfigError."""
    return named_order(config.of(PolicySettings).scheduling_policy)


def named_order(name: str) -> ServiceOrder | None:
    """The order by the policy of that name; None: the scheduler's own. Raises ConfigError."""
    if name == "priority":
        return None
    return ServiceOrder() if name == "fcfs" else GuardedOrder(load_policy(name))


def load_policy(name: str) -> SchedulingPolicy:
    """The policy `module:Class`, tried on an example. Raises ConfigError."""
    flag = f"--scheduling-policy {name}"
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"{flag}: choose priority, fcfs or module:Class")
    try:
        policy_class = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # a user's module: importing it can raise anything
        raise ConfigError(
            f"{flag}: cannot import {module_name} ({type(error).__name__}: {error}); is its folder in PYTHONPATH?"
        ) from error
    if not isinstance(policy_class, type):
        raise ConfigError(f"{flag}: {module_name} has no class {class_name}")
    try:
        policy: SchedulingPolicy = policy_class()
        _try(policy)
    except Exception as error:  # a user's class, as above
        raise ConfigError(f"{flag}: {class_name} does not work ({type(error).__name__}: {error})") from error
    return policy


def _try(policy: SchedulingPolicy) -> None:
    """Ask everything once, so that a missing method or a misspelt field shows at the start."""
    first = RequestView(0, 0, num_prompt_tokens=100, num_output_tokens=0, max_tokens=16)
    second = RequestView(0, 1, num_prompt_tokens=10, num_output_tokens=0, max_tokens=16)
    checked_key(policy.key(first))
    policy.admits(second, EngineView(num_free_blocks=8, num_blocks=16, block_size=16, num_running=1, num_waiting=1))
    policy.preempts(second, first)

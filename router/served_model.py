"""Served models: everything that a router has once per model, selected by a request's `model` field.

Only the gateway looks up models: a choice has its model's dispatcher, which has its workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.text.tokenizer import Tokenizer
from common.wings import call_wing, from_wing
from router.config import RouterConfig
from router.dispatch import Dispatcher, Roles
from router.metrics import RouterMetrics
from router.workers.model_workers import ModelLimits, ModelWorkers


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model, or an adapter of one, which shares all but its name, `adapter` and `parent` with its base."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer  # with the chat template
    workers: ModelWorkers  # with the prefix index
    dispatcher: Dispatcher  # with queue, metrics, log
    adapter: str = ""
    parent: str = ""  # name of an adapter's base
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def metrics(self) -> RouterMetrics:
        return self.dispatcher.metrics

    def limits(self) -> ModelLimits:
        return self.workers.limits(self.tokenizer.vocab_size)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that a router reads from a model's files. name: for clients; empty: `own_name`."""

    name: str
    own_name: str
    tokenizer: Tokenizer


def serve_models(config: RouterConfig, loaded: Sequence[LoadedModel]) -> list[ServedModel]:
    """Make the models of one router, in the same order. Raises ConfigError."""
    plain = [item.tokenizer for item in loaded]
    tokenizers = call_wing("router.chat_templates.templates:with_templates", config, plain) or plain
    models: list[ServedModel] = []
    for item, tokenizer in zip(loaded, tokenizers, strict=True):
        name = item.name or item.own_name
        workers = ModelWorkers(name, item.own_name, tokenizer.tokenizer_hash())
        metrics = RouterMetrics(item.own_name, models[0].metrics if models else None)
        dispatcher = Dispatcher(config, workers, metrics, roles_of(config, workers))
        models.append(ServedModel(name, (item.own_name,), tokenizer, workers, dispatcher))
    return models


def roles_of(config: RouterConfig, workers: ModelWorkers) -> Roles:
    """Choose the implementation that places the requests of one model."""
    open_roles: Callable[[RouterConfig, ModelWorkers], Roles] = (
        from_wing("router.objectives.adaptive:open_objectives")
        or from_wing("router.costs.roles:PolicyRoles")
        or Roles
    )
    return open_roles(config, workers)

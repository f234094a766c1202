"""The workers of several models: a link joins the model that its worker announces."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ConfigError, HandshakeError
from protos import types_pb2 as pb
from router.config import RouterConfig
from router.several_models.settings import ModelsSettings
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import WorkerLink
from router.workers.workers import WorkerTable


def named_models(config: RouterConfig) -> list[tuple[str, str]]:
    """Return the models that --models names, see ModelsSettings; empty without this flag."""
    return config.of(ModelsSettings).named_models()


class ModelsTable(WorkerTable):
    """The workers of one or more models. A single model takes a worker of any name, since file names may differ."""

    def __init__(self, config: RouterConfig, models: Sequence[ModelWorkers]) -> None:
        """Raises ConfigError when two models share a name."""
        super().__init__(config, models)
        used_names: set[str] = set()
        for model in models:
            names = {model.name, model.own_name}
            if clash := used_names & names:
                raise ConfigError(f"two models are called {min(clash)!r}: workers announce their model by that name")
            used_names |= names

    def _accept(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        before = self.model_of(link)
        super()._accept(link, info)
        if before is not self._announced_model(info):
            before.links.remove(link)

    def _announced_model(self, info: pb.WorkerInfo) -> ModelWorkers:
        if len(self._models) == 1:
            return super()._announced_model(info)
        for model in self._models:
            if info.model in (model.own_name, model.name):
                return model
        raise HandshakeError(
            f"{info.worker_id} serves {info.model!r}, which is none of this router's models "
            f"({', '.join(model.own_name for model in self._models)}): name it in --models, or start the worker "
            "with one of these"
        )

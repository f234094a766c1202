"""The adapters that a router serves: each is a model with its own name and its base model's workers.

A request contains a reference to the adapter's files (`AdapterRef`), so workers that start later or have evicted the
adapter read it when a request needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, InvalidRequestError, NotFoundError
from common.lora.adapter_config import read_adapter_config
from common.lora.adapter_ref import AdapterRef
from common.lora.modules import LoraModule
from router.config import ROLES
from router.gateway import Gateway
from router.lora.trial import try_adapter
from router.served_model import ServedModel
from router.workers.worker_link import WorkerLink

MAX_NAME_CHARS = 128


class LoraAdapters:
    """Adds adapters to a gateway's models, and removes them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()  # two loads of one name run one after the other
        self._watched: set[str] = set()  # names of the adapters of --lora-dir

    def serve(self, modules: Sequence[LoraModule]) -> None:
        """Serve adapters from the router's start. Raises ConfigError."""
        for module in modules:
            try:
                base = self._base(module.base)
                self._check_name(module.name, in_place=False)
            except (InvalidRequestError, NotFoundError) as error:
                raise ConfigError(f"--lora-modules {module.name}: {error}") from None
            self._add(module.name, base, _reference(module.folder))

    async def load(self, name: str, folder: Path, base_name: str = "", in_place: bool = False) -> None:
        """Serve an adapter once all workers have read it.

        in_place: allow the name of another adapter; that one's open requests finish with it. Raises
        InvalidRequestError if the name is taken, or if the files are not an adapter of the model.
        """
        async with self._lock:
            base = self._base(base_name)
            self._check_not_watched(name)
            self._check_name(name, in_place)
            try:
                ref = await asyncio.to_thread(_reference, folder)
            except ConfigError as error:
                raise InvalidRequestError(str(error), "lora_path") from None
            await self._try_and_add(name, base, ref)

    async def unload(self, name: str) -> None:
        """Stop serving an adapter; its open requests continue. Raises NotFoundError or InvalidRequestError."""
        async with self._lock:
            if self._adapter(name) is None:
                raise NotFoundError(f"The lora adapter {name[:MAX_NAME_CHARS]!r} cannot be found.")
            self._check_not_watched(name)
            self._remove(name)

    def watched(self) -> dict[str, str]:
        """Return the references of the served adapters of --lora-dir, by name."""
        return {model.name: model.adapter for model in self._gateway.models if model.name in self._watched}

    def add_watched(self, name: str, ref: AdapterRef) -> None:
        """Serve an adapter of --lora-dir without trying it on workers. Raises InvalidRequestError for a bad name."""
        self._check_name(name, in_place=False)
        self._add(name, self._base(""), ref)
        self._watched.add(name)

    async def load_watched(self, name: str, ref: AdapterRef) -> None:
        """Serve an adapter of --lora-dir once all workers have read it, replacing an older one. Raises as `load`
        does."""
        async with self._lock:
            self._check_name(name, in_place=name in self._watched)
            await self._try_and_add(name, self._base(""), ref)
            self._watched.add(name)

    async def remove_watched(self, name: str) -> None:
        async with self._lock:
            self._watched.remove(name)
            self._remove(name)

    async def _try_and_add(self, name: str, base: ServedModel, ref: AdapterRef) -> None:
        links: list[WorkerLink] = [link for role in ROLES for link in base.workers.usable(role)]
        try:
            await try_adapter(str(ref), links)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), "lora_path") from None
        self._add(name, base, ref)

    def _base(self, name: str) -> ServedModel:
        model = self._gateway.model(name or None)
        if model.adapter:
            raise InvalidRequestError(f"{name[:MAX_NAME_CHARS]!r} is an adapter itself", "base_model_name")
        return model

    def _adapter(self, name: str) -> ServedModel | None:
        return next((model for model in self._gateway.models if model.name == name and model.adapter), None)

    def _check_not_watched(self, name: str) -> None:
        if name in self._watched:
            raise InvalidRequestError(f"{name!r} is served from --lora-dir: change its folder there", "lora_name")

    def _check_name(self, name: str, in_place: bool) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequestError(f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters", "lora_name")
        if self._adapter(name) is not None:
            if not in_place:
                message = f"The lora adapter {name!r} has already been loaded; load_inplace loads it again."
                raise InvalidRequestError(message, "lora_name")
        elif name in self._gateway.by_name:
            raise InvalidRequestError(f"{name!r} is the name of a model", "lora_name")

    def _add(self, name: str, base: ServedModel, ref: AdapterRef) -> None:
        if self._adapter(name) is not None:
            self._remove(name)
        model = replace(base, name=name, aliases=(), adapter=str(ref), parent=base.name)
        self._gateway.models.append(model)
        self._gateway.by_name[name] = model

    def _remove(self, name: str) -> None:
        """Stop serving the adapter with that name. Its open requests continue."""
        self._gateway.models.remove(self._gateway.by_name.pop(name))


def _reference(folder: Path) -> AdapterRef:
    """Return a reference to a folder with a plain LoRA adapter. Raises ConfigError."""
    read_adapter_config(folder)
    return AdapterRef.of(folder)

"""The adapters of one engine: opened from its settings, and the runner that computes with them."""

from __future__ import annotations

from typing import Any

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from common.lora.modules import parse_lora_modules
from engine.config import EngineConfig
from engine.loader.load import LoadedModel
from engine.lora.cpu_layers import CpuAdapter
from engine.lora.cpu_runner import LoraCpuRunner
from engine.lora.layers import Layers, can_change, layers_of
from engine.lora.reader import AdapterFile
from engine.lora.settings import NO_GPU, LoraSettings
from engine.lora.store import AdapterStore


def open_adapters(loaded: LoadedModel, config: EngineConfig) -> CpuAdapters | None:
    """The adapters of a model; None: it serves none. Raises ConfigError where it cannot."""
    settings = config.of(LoraSettings)
    if not settings.enable_lora:
        return None
    if loaded.device.type != "cpu":
        raise ConfigError(NO_GPU)
    if not any(map(can_change, loaded.model.blocks)):
        raise ConfigError(f"--enable-lora: adapters cannot change any layer of {loaded.config.architecture}")
    layers = layers_of(loaded.config, loaded.model.config, loaded.shard)
    adapters = CpuAdapters(loaded, layers, settings)
    for module in parse_lora_modules(settings.lora_modules):
        adapters.get(str(AdapterRef.of(module.folder)))
    return adapters


class CpuAdapters(AdapterStore[CpuAdapter]):
    """See Adapters in engine.wings."""

    def __init__(self, loaded: LoadedModel, layers: Layers, settings: LoraSettings) -> None:
        def open_file(ref: AdapterRef) -> AdapterFile:
            return AdapterFile(ref, layers, settings.max_lora_rank)

        def read(file: AdapterFile) -> CpuAdapter:
            return CpuAdapter.of(file.read(loaded.dtype))

        super().__init__(open_file, read, settings.max_loras)

    def runner(self, *args: Any) -> LoraCpuRunner:
        """See Adapters."""
        return LoraCpuRunner(self, *args)

"""An engine's adapters: opened by its settings, with the runner that computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.lora.adapter_ref import AdapterRef
from common.lora.modules import parse_lora_modules
from engine.config import EngineConfig
from engine.loader.load import LoadedModel
from engine.lora.cpu_layers import CpuAdapter
from engine.lora.cpu_runner import LoraCpuRunner
from engine.lora.layers import Layers, can_change, layers_of, limited, of_stage
from engine.lora.reader import AdapterFile
from engine.lora.settings import LoraSettings
from engine.lora.store import AdapterStore
from engine.wings import Adapters

if TYPE_CHECKING:
    from engine.lora.gpu_adapters import GpuAdapters


def open_adapters(loaded: LoadedModel, config: EngineConfig) -> Adapters | None:
    """Return a model's adapters, or None without --enable-lora. Raises ConfigError if no layer can have any."""
    settings = config.of(LoraSettings)
    if not settings.enable_lora:
        return None
    if not any(map(can_change, loaded.model.blocks)):
        raise ConfigError(f"--enable-lora: adapters cannot change any layer of {loaded.config.architecture}")
    layers = layers_of(loaded.config, loaded.model.config, loaded.shard)
    if settings.lora_target_modules:
        layers = limited(layers, settings.lora_target_modules.split(","))
    num_layers = loaded.config.num_layers
    stage = range(*(loaded.shard.layers or (0, num_layers)))
    if len(stage) < num_layers:
        layers = of_stage(layers, stage, num_layers)
    kind: type[CpuAdapters | GpuAdapters] = CpuAdapters
    if loaded.device.type == "cuda":
        from engine.lora.gpu_adapters import FollowedGpuAdapters, GpuAdapters  # both need triton

        leads = loaded.shard.rank == 0 and stage.stop == num_layers
        kind = GpuAdapters if leads else FollowedGpuAdapters
    adapters = kind(loaded, layers, settings, config.pp)
    for module in parse_lora_modules(settings.lora_modules):
        adapters.preload(str(AdapterRef.of(module.folder)))
    return adapters


class CpuAdapters(AdapterStore[CpuAdapter]):
    """See Adapters in engine.wings."""

    def __init__(self, loaded: LoadedModel, layers: Layers, settings: LoraSettings, _: int) -> None:
        def open_file(ref: AdapterRef) -> AdapterFile:
            return AdapterFile(ref, layers, settings.max_lora_rank)

        def read(_: str, file: AdapterFile) -> CpuAdapter:
            return CpuAdapter.of(file.read(loaded.dtype))

        super().__init__(open_file, read, settings.max_loras)

    def runner(self, *args: Any, **_: Any) -> LoraCpuRunner:
        """See Adapters."""
        return LoraCpuRunner(self, *args)

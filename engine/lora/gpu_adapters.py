"""An engine's adapters on a GPU, see `engine/lora/adapters.py`."""

from __future__ import annotations

from typing import Any

from common.lora.adapter_ref import AdapterRef
from engine.config import GpuConfig
from engine.loader.load import LoadedModel
from engine.lora.gpu_runner import LoraGpuRunner
from engine.lora.gpu_slots import FollowedSlots, GpuSlots, SlotStore
from engine.lora.layers import Layers, without_vocabulary
from engine.lora.reader import AdapterFile
from engine.lora.settings import LoraSettings


class GpuAdapters(SlotStore):
    """See Adapters in engine.wings. For the engine's own rank, if there are several."""

    def __init__(self, loaded: LoadedModel, layers: Layers, settings: LoraSettings, num_stages: int) -> None:
        if not settings.lora_target_modules:  # the vocabulary takes much memory, and two launches per step each
            layers = without_vocabulary(layers)
        slots = GpuSlots(layers, settings.max_loras, settings.max_lora_rank, loaded.dtype, loaded.device)

        def open_file(ref: AdapterRef) -> AdapterFile:
            return AdapterFile(ref, layers, settings.max_lora_rank)

        super().__init__(open_file, slots.fill, settings.max_loras, max(num_stages, 2))
        self._in_memory = slots

    def runner(self, *args: Any, gpu: GpuConfig, max_model_len: int) -> LoraGpuRunner:
        """See Adapters."""
        held, ranks = args[:4], args[4:]
        return LoraGpuRunner(self, self._in_memory, *held, gpu, max_model_len, *ranks)


class FollowedGpuAdapters(FollowedSlots, GpuAdapters):
    """The adapters of a rank other than the engine's."""

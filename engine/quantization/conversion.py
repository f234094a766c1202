"""What becomes of a model's linear layers while it is built: by the settings, the checkpoint and the device.

checkpoint's weights       --quant-mode auto              a mode
packed (GPTQ, AWQ, FP8)    `PackedLinears`, as they are   dequantized, then `Quantizer`
MXFP4 experts              `Mxfp4Experts`, on GPUs        likewise
4-bit GGUF blocks          `Quantizer`, as they are       as they are with int4-weight
plain                      `Quantizer`, on CPUs to int8   `Quantizer`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import Protocol

import torch

from common.errors import ConfigError, UnsupportedModelError
from engine.config import EngineConfig
from engine.layers.block import Block
from engine.layers.linear import Linear
from engine.layers.weights import Part, WeightSource
from engine.models.model import Model
from engine.moe.moe import Moe
from engine.quantization.int4 import Int4Source
from engine.quantization.mxfp4 import Mxfp4Experts, Mxfp4Weights
from engine.quantization.packed_checkpoint import PackedWeights
from engine.quantization.packed_linears import PackedLinears, can_keep_packed, packed_names
from engine.quantization.quantize import Quantizer
from kvstore.layout import Shard

logger = logging.getLogger(__name__)
GPU_CAPABILITIES = {"fp8": (8, 9), "w8a8": (8, 0)}  # of modes that exist on GPUs alone: their matrix units
EXPERTS = "on a GPU a layer's experts must all be quantized, shared ones too, or none: use --quant-mode none"


class Converter(Protocol):
    """Replaces linear layers of a model that is being built."""

    def convert(self, block: Block) -> None:
        """Replace the block's layers, as soon as the block is there."""
        ...

    def finish(self, model: Model) -> None:
        """Replace the output projection, when all blocks are done."""
        ...


class Conversion:
    """The choice for one model, made before any weight is read.

    quant_mode: the mode, or a checkpoint's label where its weights stay as they are. identity: what else tells models
    apart that are held otherwise, once there is a converter.
    """

    def __init__(
        self, weights: WeightSource, config: EngineConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for a mode that has no kernel or no weights."""
        self.identity: dict[str, str] = {}
        self._dtype, self._device = dtype, device
        self._stored = weights
        self._linears: PackedLinears | None = None
        self._packed: PackedWeights | None = None
        self._mxfp4: Mxfp4Weights | None = None
        self._int4: Int4Source | None = None
        is_auto = config.quant_mode == "auto"
        if is_auto and isinstance(weights, Mxfp4Weights) and can_keep_mxfp4(dtype, device):
            self._mxfp4 = weights
        if is_auto and isinstance(weights, PackedWeights) and can_keep_packed(dtype, device):
            self._packed = weights
            self.quant_mode = weights.quantization.label
        elif isinstance(weights, Int4Source) and weights.has_int4:
            self.quant_mode = resolve_quant_mode(config, dtype, device, has_int4=True)
            if self.quant_mode == "int4-weight":
                self._int4 = weights
        elif is_auto and shard.size > 1:
            self.quant_mode = "none"
        else:
            self.quant_mode = resolve_quant_mode(config, dtype, device)

    @property
    def leaves_attention_plain(self) -> bool:
        """Whether `convert` finds the layers of attention plain."""
        return self._packed is None and self._int4 is None

    def keep_packed(self, skeleton: Model) -> frozenset[str] | None:
        """Let the checkpoint's weights stay as it holds them, where that was chosen.

        Returns the names of linear layers' weights that come without storage at first; None: none are to stay.
        """
        if self._int4 is not None:
            self._int4.keep_int4 = True
        if self._mxfp4 is not None:
            self._mxfp4.keeps_packed = True
        if self._packed is None:
            return None
        self._packed.kept = packed_names(skeleton, self._packed)
        check_packed_experts(skeleton, self._device, self._packed.kept)
        return self._packed.kept

    def converter(self, parts: Mapping[str, Part], on_read: Callable[[str], None]) -> Converter:
        """parts: of weights of which this rank has no more. on_read: called with the name of each that it reads."""
        if self._packed is not None:
            self._linears = PackedLinears(self._dtype, self._device, self._packed, parts, on_read)
            self.identity["linears"] = self._linears.identity
            return self._linears
        if self._mxfp4 is not None:
            return Mxfp4Experts(self._mxfp4, parts, on_read)
        int4 = None if self._int4 is None else self._int4.int4
        return Quantizer(self.quant_mode, int4, self._device.type == "cuda")

    def end(self) -> None:
        """Log what became of a quantized checkpoint. Raises ConfigError for tensors of it that cannot be left out."""
        if isinstance(self._stored, PackedWeights):
            self._stored.check_idle_biases()
            held = "were dequantized" if self._linears is None else f"are {self._linears.made}"
            logger.info("%s: linear layers %s", self._stored.quantization.label, held)


def can_keep_mxfp4(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has kernels for a checkpoint's MXFP4 experts with x of that type."""
    return device.type == "cuda" and dtype == torch.bfloat16


def resolve_quant_mode(
    engine_config: EngineConfig, dtype: torch.dtype, device: torch.device, has_int4: bool = False
) -> str:
    """`auto`: on a CPU with bfloat16 the 4-bit weights of a file that has them, else int8; elsewhere none.

    Raises ConfigError for what has no kernel or no weights.
    """
    wanted = engine_config.quant_mode
    if wanted == "auto":
        fits = device.type == "cpu" and dtype == torch.bfloat16
        return ("int4-weight" if has_int4 else "int8-weight") if fits else "none"
    if wanted == "none":
        return wanted
    if dtype != torch.bfloat16:
        raise ConfigError(f"--quant-mode {wanted} needs --dtype bfloat16; use --quant-mode none")
    if wanted in GPU_CAPABILITIES:
        if device.type == "cpu":
            raise ConfigError(f"--quant-mode {wanted} needs a GPU; on a CPU use int8-weight")
        needed, found = GPU_CAPABILITIES[wanted], torch.cuda.get_device_capability(device)
        if found < needed:
            raise ConfigError(
                f"--quant-mode {wanted} needs a GPU of compute capability {needed[0]}.{needed[1]}, this one has "
                f"{found[0]}.{found[1]}; use int8-weight"
            )
    return wanted


def check_packed_experts(skeleton: Model, device: torch.device, packed: Container[str]) -> None:
    """Raise UnsupportedModelError for a layer's experts of which only some stay quantized: `packed`."""
    if device.type != "cuda":
        return
    for block in skeleton.blocks:
        if isinstance(block, Moe):
            experts = [*block.experts.values(), *([] if block.shared is None else [block.shared])]
            for layers in zip(*((expert.gate_up, expert.down) for expert in experts), strict=True):
                if len({_is_packed(layer, packed) for layer in layers}) > 1:
                    raise UnsupportedModelError(EXPERTS)


def _is_packed(layer: Linear, packed: Container[str]) -> bool:
    return all(name in packed for name in layer.names)

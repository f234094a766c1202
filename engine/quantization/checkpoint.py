"""A quantized checkpoint as the loader opens it: its format from config.json, and the weights of its files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from engine.fused.stored_rows import StoredRows
from engine.layers.weights import PartSource, WeightSource
from engine.loader.checkpoint import Check, Shape, check_weights
from engine.loader.safetensors import SafetensorsWeights
from engine.models.config import PLAIN_BITS
from engine.quantization.bitsandbytes import BitsAndBytesWeights, bits_of, is_bitsandbytes
from engine.quantization.mxfp4 import Mxfp4Weights, RandomMxfp4Weights
from engine.quantization.packed_checkpoint import PackedWeights
from engine.quantization.schemes import is_mxfp4, quantization_from_hf
from engine.quantization.unstacked_experts import UnstackedExperts

logger = logging.getLogger(__name__)


class QuantizedCheckpoint:
    """A checkpoint's format. bits: of most weights in the files. held_bits: in memory, if they stay quantized.

    label: the format of linear layers; empty for MXFP4, which only experts have, and for dequantized weights.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """raw: config.json. Raises UnsupportedModelError, which names the supported formats."""
        config = raw.get("quantization_config")
        self._is_bitsandbytes = is_bitsandbytes(config)
        self._is_mxfp4 = not self._is_bitsandbytes and is_mxfp4(raw)
        is_other = self._is_bitsandbytes or self._is_mxfp4
        self._quantization = None if is_other else quantization_from_hf(raw)
        self.label, self.bits, self.held_bits = "", 4, 4
        if isinstance(config, Mapping) and self._is_bitsandbytes:
            self.bits, self.held_bits = bits_of(config), PLAIN_BITS
        if self._quantization is not None:
            scheme = self._quantization.schemes[0]
            self.label, self.bits, self.held_bits = self._quantization.label, scheme.bits, scheme.held_bits
            if raw.get("model_type") == "gpt_oss":  # its stacked experts are dequantized
                self.held_bits = PLAIN_BITS

    def open(
        self, tensors: SafetensorsWeights, rows: Mapping[str, StoredRows], needed: Mapping[str, Shape]
    ) -> tuple[WeightSource, Check]:
        """Open the weights, and return their check against those that a model needs, see `check_weights`."""
        weights, check = self._open(tensors, rows)
        unstacked = UnstackedExperts(weights, check, needed, tensors.shapes)
        return (unstacked, unstacked.check) if unstacked.is_needed else (weights, check)

    def random(
        self, plain: WeightSource, needed: Mapping[str, Shape], dtype: torch.dtype, device: torch.device
    ) -> WeightSource:
        """Return random weights in this format if that is supported, otherwise plain ones."""
        if self._is_mxfp4:
            return RandomMxfp4Weights(plain, needed, dtype, device)
        if self.label:
            logger.info("random weights are plain, not %s; --quant-mode quantizes them", self.label)
        return plain

    def _open(self, tensors: SafetensorsWeights, rows: Mapping[str, StoredRows]) -> tuple[PartSource, Check]:
        if self._is_bitsandbytes:
            dequantized = BitsAndBytesWeights(tensors, rows)
            return dequantized, partial(check_weights, found=dequantized.shapes)
        if self._quantization is None:
            expanded = Mxfp4Weights(tensors)
            return expanded, partial(check_weights, found=expanded.shapes)
        packed = PackedWeights(tensors, self._quantization, rows)
        return packed, packed.check

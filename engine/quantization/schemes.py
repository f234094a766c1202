"""The formats of quantized checkpoints, by `quant_method` of a config.json's `quantization_config`.

Which layers are quantized is told by the tensors, not by the config, whose lists of exceptions have many spellings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.errors import ConfigError, UnsupportedModelError
from engine.quantization.formats import auto_round, awq, compressed_tensors, fp8, gptq, modelopt
from engine.quantization.formats.scheme import CheckpointQuantization, NotSupportedError

DEQUANTIZED = "bitsandbytes (NF4, FP4 and int8)"  # not one of the formats: see bitsandbytes.py
Parse = Callable[[Mapping[str, Any]], CheckpointQuantization]
FORMATS: dict[str, tuple[str, Parse]] = {
    "gptq": ("GPTQ (4 and 8 bits)", gptq.parse),
    "awq": ("AWQ (4 bits, GEMM layout)", awq.parse),
    "auto-round": ("AutoRound (in GPTQ's and AWQ's packing)", auto_round.parse),
    "fp8": ("FP8 (e4m3)", fp8.parse),
    "compressed-tensors": (
        "compressed-tensors (fp8, int8, and NVFP4, and packed integers of 4 and 8 bits)", compressed_tensors.parse,
    ),
    "modelopt": ("ModelOpt (FP8 and NVFP4)", modelopt.parse),
}  # fmt: skip


def quantization_from_hf(raw: Mapping[str, Any]) -> CheckpointQuantization | None:
    """Parse `quantization_config`; None for plain weights. Raises UnsupportedModelError, naming what is supported."""
    config = raw.get("quantization_config") or raw.get("compression_config") or raw.get("quantization")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError("config.json: quantization_config is not an object")
    method = str(config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else "unknown"))
    method = method.removeprefix("intel/")  # in AutoRound's first releases
    try:
        if method == "unknown" and {"group_size", "bits"} <= config.keys():
            raise NotSupportedError("MLX's packing, which is for Apple's GPUs,")
        if method not in FORMATS:
            raise NotSupportedError(repr(method))
        return FORMATS[method][1](config)
    except NotSupportedError as error:
        known = ", ".join((*(name for name, _ in FORMATS.values()), DEQUANTIZED))
        raise UnsupportedModelError(
            f"the weights are quantized: {error} is not supported; supported are {known}; other models as GGUF or "
            "unquantized"
        ) from None


def is_mxfp4(raw: Mapping[str, Any]) -> bool:
    """Whether experts' weights are MXFP4, as in gpt-oss; not a format of linear layers."""
    config = raw.get("quantization_config")
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"

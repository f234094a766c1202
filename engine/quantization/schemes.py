"""Quantization schemes of the linear layers' weights, from `quantization_config` of a config.json.

Reads the config only. How each layout looks in the files is in `engine/quantization/packed_layouts.py`. Which layers
are quantized is not read here either: lists of exceptions are spelled in many ways, the tensors themselves are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.errors import ConfigError, UnsupportedModelError

SUPPORTED = (
    "supported are GPTQ (4 and 8 bits), AWQ (4 bits, GEMM layout), FP8 (e4m3) and compressed-tensors (fp8, int8, and "
    "packed integers of 4 and 8 bits); other models as GGUF or unquantized"
)
Layout = Literal["gptq", "awq", "packed", "int8", "fp8"]
WHOLE = 0  # a block that spans all rows or all columns
GPTQ_FORMATS = ("gptq", "gptq_v2")
TENSOR, ROW = (WHOLE, WHOLE), (1, WHOLE)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How one linear layer's weight is stored.

    block: rows (outputs) and columns (inputs) that share a scale; WHOLE is all of them.
    is_symmetric: no zero points are stored. GPTQ and AWQ always store them.
    subtracts_one: GPTQ's first format stores zero points less one.
    quantizes_inputs: the layer was made for inputs of 8 bits, so its GEMM may quantize them.
    """

    layout: Layout
    bits: int
    block: tuple[int, int]
    is_symmetric: bool = True
    subtracts_one: bool = False
    quantizes_inputs: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """`label` names it in logs and worker infos. A quantized layer follows the first scheme that its tensors fit."""

    label: str
    schemes: tuple[WeightScheme, ...]


def quantization_from_hf(raw: Mapping[str, Any]) -> CheckpointQuantization | None:
    """Parse `quantization_config`; None for plain weights. Raises UnsupportedModelError, naming what is supported."""
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError("config.json: quantization_config is not an object")
    method = str(config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else "unknown"))
    parse = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}.get(method)
    if parse is None:
        raise _unsupported(repr(method))
    return parse(config)


def is_mxfp4(raw: Mapping[str, Any]) -> bool:
    """Whether experts' weights are MXFP4, as gpt-oss is published: no format of linear layers."""
    config = raw.get("quantization_config")
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"


def _gptq(config: Mapping[str, Any]) -> CheckpointQuantization:
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if version not in GPTQ_FORMATS or config.get("is_marlin_format"):
        raise _unsupported(f"GPTQ in the checkpoint format {'marlin' if version in GPTQ_FORMATS else version!r}")
    if config.get("pack_dtype", "int32") != "int32":
        raise _unsupported(f"GPTQ packed in {config['pack_dtype']!r}")
    bits = _bits(config.get("bits"), (4, 8), "GPTQ")
    base = WeightScheme("gptq", bits, (1, _group_size(config)), False, subtracts_one=version == "gptq")
    schemes = [base]
    overrides = config.get("dynamic") or {}  # pattern of names -> what differs there; "-:..." is not quantized
    if not isinstance(overrides, Mapping):
        raise ConfigError("config.json: quantization_config.dynamic is not an object")
    for pattern, change in overrides.items():
        if not str(pattern).startswith("-:") and isinstance(change, Mapping):
            merged = {**config, **change}
            schemes.append(
                replace(base, bits=_bits(merged.get("bits"), (4, 8), "GPTQ"), block=(1, _group_size(merged)))
            )
    return CheckpointQuantization(f"gptq-{bits}bit", tuple(dict.fromkeys(schemes)))


def _awq(config: Mapping[str, Any]) -> CheckpointQuantization:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise _unsupported(f"AWQ in the layout {version!r}")
    bits = _bits(config.get("bits", config.get("w_bit")), (4,), "AWQ")
    if config.get("zero_point", True) is not True:
        raise _unsupported("AWQ without zero points")
    return CheckpointQuantization("awq-4bit", (WeightScheme("awq", bits, (1, _group_size(config)), False),))


def _fp8(config: Mapping[str, Any]) -> CheckpointQuantization:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"FP8 of the format {config['fmt']!r}")
    block = config.get("weight_block_size")
    blocks = [_block(block)] if block else [TENSOR, ROW]
    schemes = tuple(WeightScheme("fp8", 8, shared, quantizes_inputs=True) for shared in blocks)
    return CheckpointQuantization("fp8-blocks" if block else "fp8-weights", schemes)


def _compressed_tensors(config: Mapping[str, Any]) -> CheckpointQuantization:
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _unsupported(f"compressed-tensors with {key}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ConfigError("config.json: quantization_config.config_groups is not an object of objects")
    schemes, labels = [], []
    for group in groups.values():
        weights = group.get("weights")
        if weights is None:  # a group of inputs alone
            continue
        if not isinstance(weights, Mapping):
            raise ConfigError("config.json: the weights of a config group are not an object")
        scheme = _group_scheme(weights, str(group.get("format") or config.get("format")))
        scheme = replace(scheme, quantizes_inputs=_has_eight_bits(group.get("input_activations")))
        input_bits = 8 if scheme.quantizes_inputs else 16
        schemes.append(scheme)
        labels.append(f"{'fp' if scheme.layout == 'fp8' else ''}w{scheme.bits}a{input_bits}")
    if not schemes:
        raise _unsupported("compressed-tensors without quantized weights")
    label = "compressed-tensors-" + "+".join(sorted(set(labels)))
    return CheckpointQuantization(label.replace("fpw8a8", "fp8").replace("fpw8a16", "fp8a16"), tuple(schemes))


def _group_scheme(weights: Mapping[str, Any], stored_as: str) -> WeightScheme:
    kind, bits = str(weights.get("type") or "int").lower(), weights.get("num_bits", 8)
    layouts: dict[tuple[str, str], tuple[Layout, tuple[int, ...]]] = {
        ("pack-quantized", "int"): ("packed", (4, 8)),
        ("int-quantized", "int"): ("int8", (8,)),
        ("naive-quantized", "int"): ("int8", (8,)),
        ("float-quantized", "float"): ("fp8", (8,)),
        ("naive-quantized", "float"): ("fp8", (8,)),
    }
    layout, widths = layouts.get((stored_as, kind), ("packed", ()))
    what = f"compressed-tensors of the format {stored_as!r}"
    width = _bits(bits, widths, f"{what} of {kind} numbers")
    stated = weights.get("group_size")
    group_size = _group_size({"group_size": -1 if stated is None else stated})
    by_size = "tensor" if stated is None else "group" if group_size else "channel"
    strategy = str(weights.get("strategy") or by_size)
    if strategy == "group" and not group_size:
        raise ConfigError("config.json: a config group with scales per group has no group_size")
    blocks = {"tensor": TENSOR, "channel": ROW, "group": (1, group_size)}
    if strategy == "block":
        block = _block(weights.get("block_structure"))
    elif strategy in blocks:
        block = blocks[strategy]
    else:
        raise _unsupported(f"{what} with scales per {strategy}")
    return WeightScheme(layout, width, block, bool(weights.get("symmetric", True)))


def _bits(value: Any, known: tuple[int, ...], what: str) -> int:
    if type(value) is not int or value not in known:
        raise _unsupported(f"{what} with {value!r} bits")
    return value


def _group_size(config: Mapping[str, Any]) -> int:
    """Columns that share a scale; -1 in the config is WHOLE."""
    value = config.get("group_size", config.get("q_group_size", 128))
    if type(value) is not int or not (value == -1 or value > 0):
        raise ConfigError(f"config.json: quantization_config.group_size must be -1 or positive, not {value!r}")
    return WHOLE if value == -1 else value


def _block(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json: blocks of scales must be two positive sizes, not {value!r}")


def _has_eight_bits(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and inputs.get("num_bits", 8) == 8


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the weights are quantized: {what} is not supported; {SUPPORTED}")

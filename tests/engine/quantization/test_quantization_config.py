"""`quantization_config`: supported configs are read, and others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError, UnsupportedModelError
from engine.quantization.formats.compressed_tensors import PackQuantized
from engine.quantization.formats.fp8 import Fp8, Int8
from engine.quantization.formats.gptq import Gptq
from engine.quantization.formats.scheme import ROW, TENSOR, WHOLE, WeightScheme
from engine.quantization.schemes import quantization_from_hf
from tests.engine.quantization.packed_files import FP8, INPUTS8, compressed, gptq, integers

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def parse(config: Any) -> Any:
    return quantization_from_hf({"quantization_config": config})


def test_plain_weights_have_none() -> None:
    assert quantization_from_hf({}) is None
    assert parse(None) is None


@pytest.mark.parametrize(
    ("config", "label", "schemes"),
    [
        (
            {
                "quant_method": "intel/auto-round",
                "bits": 4,
                "group_size": 64,
                "backend": "auto_round:gptq:exllamav2",
                "extra_config": {"a": {"bits": 8}, "b": {"bits": 16}, "c": {"group_size": -1}},
            },
            "auto-round-4bit",
            [Gptq(bits, (1, group), False, subtracts_one=True) for bits, group in ((4, 64), (8, 64), (4, WHOLE))],
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8-blocks",
            [Fp8(8, (128, 128), quantizes_inputs=True)],
        ),
        ({"quant_method": "fp8"}, "fp8-weights", [Fp8(8, shared, quantizes_inputs=True) for shared in (TENSOR, ROW)]),
        (
            compressed("float-quantized", {**FP8, "strategy": "tensor"}, INPUTS8),
            "compressed-tensors-fp8",
            [Fp8(8, TENSOR, quantizes_inputs=True)],
        ),
        (
            compressed("naive-quantized", {**FP8, "strategy": "block", "block_structure": [64, 32]}),
            "compressed-tensors-fp8a16",
            [Fp8(8, (64, 32))],
        ),
        (
            compressed("int-quantized", integers(8, -1), INPUTS8),
            "compressed-tensors-w8a8",
            [Int8(8, ROW, quantizes_inputs=True)],
        ),
        (
            compressed("pack-quantized", {"num_bits": 4, "group_size": 64, "symmetric": False}),
            "compressed-tensors-w4a16",
            [PackQuantized(4, (1, 64), is_symmetric=False)],
        ),
    ],
)
def test_what_is_understood(config: dict[str, Any], label: str, schemes: list[WeightScheme]) -> None:
    """In addition to the configs that test_packed_parts.py and test_published.py read weights with."""
    quantization = parse(config)
    assert quantization.label == label
    assert list(quantization.schemes) == schemes


def test_groups_of_maps_may_differ() -> None:
    config = compressed("pack-quantized", integers(4))
    config["config_groups"]["group_1"] = {"weights": integers(8, -1), "targets": ["re:.*down_proj"]}
    quantization = parse(config)
    assert quantization.label == "compressed-tensors-w4a16+w8a16"
    assert [scheme.bits for scheme in quantization.schemes] == [4, 8]


def test_the_older_name_of_the_field() -> None:
    config = compressed("pack-quantized", integers(4))
    del config["quant_method"]
    assert quantization_from_hf({"compression_config": config}) is not None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 in groups of 32"),
        ({"bits": 4}, "'unknown'"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
            "int in the packing 'auto_round'",
        ),
        ({"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_gptq"}, "GPTQ with 2 bits"),
        (gptq(3), "GPTQ with 3 bits"),
        (gptq(2), "GPTQ with 2 bits"),
        ({"quant_method": "gptq"}, "GPTQ with None bits"),
        (gptq(True), "GPTQ with True bits"),
        (gptq(checkpoint_format="marlin"), "GPTQ in the checkpoint format 'marlin'"),
        (gptq(is_marlin_format=True), "format 'marlin'"),
        (gptq(pack_dtype="int16"), "GPTQ packed in 'int16'"),
        (gptq(dynamic={"+:.*": {"bits": 3}}), "GPTQ with 3 bits"),
        ({**AWQ, "bits": 8}, "AWQ with 8 bits"),
        ({**AWQ, "version": "gemv_fast"}, "AWQ in the layout 'gemv_fast'"),
        ({**AWQ, "zero_point": False}, "AWQ without zero points"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 of the format 'e5m2'"),
        (
            compressed("mxfp4-pack-quantized", {**FP8, "num_bits": 4}),
            "'mxfp4-pack-quantized' of float numbers with 4",
        ),
        (compressed("marlin-24", integers(4)), "'marlin-24'"),
        (compressed("pack-quantized", integers(2)), "with 2 bits"),
        (compressed("pack-quantized", integers(4, strategy="token")), "scales per token"),
        ({**compressed("int-quantized", integers(8)), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({**compressed("int-quantized", integers(8)), "transform_config": {"r": {}}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "without quantized weights"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(config: dict[str, Any], found: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(config)
    assert found in str(caught.value)
    assert "supported are GPTQ" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        "gptq",
        [1],
        gptq(group_size=0),
        gptq(group_size="32"),
        gptq(dynamic=["x"]),
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "extra_config": ["x"]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
        compressed("pack-quantized", integers(4, group_size={})),
        compressed("pack-quantized", integers(4, group_size=None)),
        compressed("naive-quantized", {**FP8, "strategy": "block"}),
    ],
)
def test_nonsense_is_a_config_error(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        parse(config)

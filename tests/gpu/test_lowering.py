"""The forms of a step on a GPU against each other, on equal inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.few_rows import split_k
from engine.gpu.attention.backend import GpuInputs, GroupInputs
from engine.gpu.forward import FusedForward
from engine.gpu.lowering import RULES
from engine.gpu.ops import plain
from engine.gpu.ops.rules import GpuSeams, Rule, Target, fitting
from engine.kv.memory import kv_layout
from engine.layers.block import Block
from engine.loader.load import LoadedModel, load_model
from engine.models.model import Model
from engine.quantization import conversion
from engine.quantization import gpu_ops as quantized
from engine.quantization.gpu_linears import GpuLinears
from engine.tensor_parallel.gpu_seams import gpu_ranks
from kernels.gpu.elementwise.rms_norm import add_rms_norm
from kernels.gpu.few_rows.split_k import SplitKWorkspace
from kvstore.layout import PoolGeometry
from tests.gpu.kv.test_kv_groups import GEMMA3, GPT_OSS
from tests.gpu.models import save_family, save_tiny_model, use_small_tiles
from tests.kernels.helpers import relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def rules_of(block: Block, rows: int) -> list[Rule]:
    """Return the rules that fit decode steps; the first one is used unless another block prevents it."""
    return fitting(block, RULES, Target(rows, True, GpuSeams(), SplitKWorkspace(torch.device("meta"))))


def ways_of(model: Model, rows: int) -> list[set[str]]:
    return [{rule.way for rule in rules_of(block, rows)} for block in model.blocks]


def inputs_at(position: int, tables: Sequence[Tensor], vocab_size: int) -> GpuInputs:
    """Make inputs of rows that compute a token at `position`. tables: a block table for each KV group."""
    rows = len(tables[0])
    positions = torch.full((rows,), position, dtype=torch.int32, device=DEVICE)
    token_ids = torch.arange(rows, device=DEVICE) * (vocab_size // rows)  # of all ranks
    block, offset = divmod(position, BLOCK_SIZE)
    groups = [GroupInputs(table[:, block] * BLOCK_SIZE + offset, table) for table in tables]
    return GpuInputs(token_ids, positions, positions + 1, groups)


def first_step(loaded: LoadedModel, config: EngineConfig, rows: int, group: Any) -> tuple[FusedForward, GpuInputs]:
    """Prepare the first token of each row, over an empty pool. group: a rank's, with `DeviceGroup`'s methods."""
    layout = kv_layout(loaded.config, loaded.dtype)
    geometry = PoolGeometry(layout, rows * len(layout.groups), BLOCK_SIZE, "", loaded.shard)
    pool = torch.zeros(geometry.num_blocks, *geometry.block_shape, device=DEVICE)
    tables = torch.arange(geometry.num_blocks, dtype=torch.int32, device=DEVICE).view(-1, rows, 1)
    forward = FusedForward(
        loaded.model, pool, rows, "triton", loaded.dtype, rows, gpu_ranks(loaded, config, group)
    )  # fmt: skip
    return forward, inputs_at(0, [*tables], loaded.config.vocab_size)


@pytest.mark.parametrize("rows", [1, 3, 40])
@torch.inference_mode()
def test_hidden_states_and_kv_equal_those_of_the_plain_way(
    rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        str(folder), device=DEVICE.type, dtype="bfloat16" if ON_GPU else "float16", quant_mode="none"
    ).resolved(DEVICE.type)
    loaded = load_model(resolve_model(str(folder)), config, DEVICE)
    model = loaded.config
    tables = torch.randperm(2 * rows, device=DEVICE).view(rows, 2).int()
    inputs = inputs_at(19, [tables], model.vocab_size)
    shape = (2 * rows, model.num_layers, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    before = torch.randn(shape, device=DEVICE).to(loaded.dtype)
    results = []
    for takes in (True, False):
        pool = before.clone()
        if takes:
            assert all(split_k.SPLIT_K in ways for ways in ways_of(loaded.model, rows))
        else:
            monkeypatch.setattr("engine.gpu.lowering.RULES", plain.RULES)
        forward = FusedForward(loaded.model, pool, rows, "triton", loaded.dtype, rows)
        results.append((forward.hidden(inputs).float(), pool.float()))
    (hidden, pool), (plain_hidden, plain_pool) = results
    assert relative_error(hidden, plain_hidden) < 2e-2
    assert relative_error(pool, plain_pool) < 5e-3
    assert not torch.equal(pool, before.float())


class OneRank:
    """A group of one rank, with the methods that these models need."""

    rank, size, rows = 0, 1, None

    def all_reduce_rms_norm(self, pending: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(pending, residual, weight, eps)


@pytest.mark.parametrize("changes", [GEMMA3, GPT_OSS], ids=["gemma3", "gpt-oss"])
@torch.inference_mode()
def test_a_rank_alone_computes_what_the_plain_form_does(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_tiles(monkeypatch, 2)
    folder = save_family(tmp_path, changes)
    config = EngineConfig(str(folder), device=DEVICE.type, dtype="float32", quant_mode="none").resolved(DEVICE.type)
    hidden = []
    for group in (None, OneRank()):
        loaded = load_model(resolve_model(str(folder)), config, DEVICE)
        forward, inputs = first_step(loaded, config, 3, group)
        hidden.append(forward.hidden(inputs))
    assert relative_error(hidden[1], hidden[0]) < 1e-5


def test_wide_models_and_many_rows_go_another_way(folder: Path) -> None:
    config = EngineConfig(str(folder), device="cpu", dtype="float32", quant_mode="none").resolved("cpu")
    model = load_model(resolve_model(str(folder)), config, torch.device("cpu")).model
    assert not any(split_k.SPLIT_K in ways for ways in ways_of(model, 2))  # weights of 4 bytes


@torch.inference_mode()
def test_experts_between_layers_of_quantized_inputs_equal_the_plain_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts' partial sums are added, normed and quantized in one kernel or in several."""
    rows = 3
    use_small_tiles(monkeypatch, 4)
    monkeypatch.setattr(conversion, "resolve_quant_mode", lambda *_: "fp8")
    monkeypatch.setattr(conversion, "linears_of", lambda _dtype, device: GpuLinears(device))
    saved = save_tiny_model(tmp_path, inner=32, num_experts=4)
    loaded = load_model(resolve_model(str(saved)), EngineConfig(str(saved), dtype="float32"), DEVICE)
    model, tables = loaded.config, torch.arange(rows, dtype=torch.int32, device=DEVICE)[:, None]
    inputs = inputs_at(3, [tables], model.vocab_size)
    before = torch.randn(rows, model.num_layers, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim, device=DEVICE)
    results = []
    for takes in (True, False):
        pool = before.clone()
        if takes:
            assert rules_of(loaded.model.blocks[0], rows)[0] is quantized.RULES[0]
        else:
            monkeypatch.setattr("engine.gpu.lowering.RULES", plain.RULES)
        forward = FusedForward(loaded.model, pool, rows, "triton", loaded.dtype, rows)
        results.append(forward.hidden(inputs))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)

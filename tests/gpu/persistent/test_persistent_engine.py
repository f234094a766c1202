"""An engine whose steps of one row are one persistent kernel; without a Hopper, the kernel's reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model_files import resolve_model
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.engine import Engine
from engine.layers.linear import Linear
from engine.moe.expert_stacks import prepare
from engine.moe.moe import Moe
from engine.persistent.decoder import is_plain, parameters_of, shape_of
from engine.request_states import RequestState
from kernels.gpu.persistent.decoder import PersistentDecoder
from kernels.gpu.persistent.reference import decode_reference
from kernels.gpu.persistent.shape import Shape
from tests.engine.driving import open_model
from tests.gpu.models import save_family
from tests.gpu.test_engine import ON_GPU, PROMPTS, generate, greedy, open_gpu, run

HAS_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
HEADS = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024, "intermediate_size": 1024}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts_per_tok": 8,
    "num_experts": 128 if HAS_HOPPER else 16, "moe_intermediate_size": 128 if HAS_HOPPER else 16,
    "norm_topk_prob": True,
}  # fmt: skip
LATENTS = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_experts_per_tok": 6,
    "n_routed_experts": 64 if HAS_HOPPER else 16, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 128 if HAS_HOPPER else 16, "intermediate_size": 900 if HAS_HOPPER else 100,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_attention_heads": 16 if HAS_HOPPER else 8, "norm_topk_prob": False,
}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}  # no QK norms, biases of q, k and v
ROTATED = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "partial_rotary_factor": 0.5}
DTYPE, MAX_ERROR = ("bfloat16", 2e-2) if HAS_HOPPER else ("float32", 1e-4)
GREEDY = greedy(1)[0]
NUM_TOKENS = 12, 4  # of two requests, of which the second comes and goes while the first one decodes


class Reference(PersistentDecoder):
    def compiler(self) -> Callable[[], None]:
        return lambda: None

    def step(self, *inputs: torch.Tensor) -> torch.Tensor:
        return decode_reference(self.shape, self.parameters, self.pool, *inputs).to(self.pool.dtype)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Results of the kernel's launches, appended at each launch; a graph's launch is appended only at its capture."""
    if not HAS_HOPPER:
        monkeypatch.setattr("engine.persistent.decoder.PersistentDecoder", Reference)
        monkeypatch.setattr("engine.persistent.decoder.DTYPE", torch.float32)
        monkeypatch.setattr("engine.persistent.decoder.has_wgmma", lambda pool: True)
        monkeypatch.setattr(Shape, "fits", lambda shape: True)
    seen: list[torch.Tensor] = []
    kernel = PersistentDecoder if HAS_HOPPER else Reference
    compute = kernel.step

    def step(self: Any, *inputs: torch.Tensor) -> torch.Tensor:
        seen.append(compute(self, *inputs))
        return seen[-1]

    monkeypatch.setattr(kernel, "step", step)
    return seen


@pytest.fixture(
    scope="module",
    params=[{}, QWEN2, ROTATED, EXPERTS, LATENTS],
    ids=["QK norms", "biases", "rotated half", "experts", "latents"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**HEADS, **(WIDE if HAS_HOPPER else {}), **request.param}
    return save_family(tmp_path_factory.mktemp("model"), sizes)


def has_latents(model: Path) -> bool:
    """Whether the model has latent attention, which the kernel supports only with plain weights."""
    return "kv_lora_rank" in json.loads((model / "config.json").read_text())


def forced_logits(made: Engine, runner: Any, tokens: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits (tokens, vocab) of both requests while their output is forced."""
    seen: list[list[torch.Tensor]] = [[], []]

    def add(index: int) -> None:
        request = made.add_request(PROMPTS[index], replace(GREEDY, max_tokens=NUM_TOKENS[index]))

        def force(state: RequestState, row: torch.Tensor) -> None:
            seen[index].append(row.float().cpu().clone())
            row[tokens[index][len(state.output_token_ids)]] = 1e4

        runner.hooks[request.request_id] = force

    add(0)
    while len(seen[0]) < 4:
        made.step()
    add(1)
    run(made)
    return [torch.stack(rows) for rows in seen]


@pytest.mark.parametrize("has_graphs", [True, False] if ON_GPU else [False])
def test_rows_are_alone_and_among_others(
    has_graphs: bool, model: Path, steps: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads KV that other kernels have written, and they read its own."""
    plain = assemble(EngineConfig(str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64))
    tokens = generate(plain.engine, [replace(GREEDY, max_tokens=count) for count in NUM_TOKENS])
    want = forced_logits(plain.engine, plain.runner, tokens)
    gpu = GpuConfig(use_cuda_graph=has_graphs)
    made, runner = open_gpu(model, monkeypatch, gpu, dtype=DTYPE, block_size=8)
    got = forced_logits(made, runner, tokens)
    assert steps
    has_choices = "num_experts_per_tok" in json.loads((model / "config.json").read_text())
    max_error = 0.1 if has_choices and HAS_HOPPER else MAX_ERROR  # bfloat16 may choose another expert
    for one, other in zip(want, got, strict=True):
        assert float((one - other).norm() / one.norm()) < max_error


@pytest.mark.skipif(not HAS_HOPPER, reason="fp8 needs a GPU")
def test_fp8(model: Path, steps: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), dtype=DTYPE, block_size=8)
    tokens = generate(made, [replace(GREEDY, max_tokens=count) for count in NUM_TOKENS])
    want = forced_logits(made, runner, tokens)
    num_plain = len(steps)
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), dtype=DTYPE, block_size=8, quant_mode="fp8")
    got = forced_logits(made, runner, tokens)
    assert (len(steps) > num_plain) != has_latents(model)
    for one, other in zip(want, got, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.15


def test_weights_in_e4m3(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With e4m3 weights and scales, the kernel computes the same as with their dequantized weights."""
    if has_latents(model):
        pytest.skip("the kernel takes no latents with weights in e4m3")
    monkeypatch.setattr("engine.persistent.decoder.DTYPE", torch.float32)
    hidden = []
    for is_quantized in (True, False):
        loaded, _ = open_model(resolve_model(str(model)), dtype="float32", quant_mode="none")
        for block in loaded.model.blocks:
            for ref in block.linears():
                ref.replace(in_e4m3(ref.layer, is_quantized))
            if isinstance(block, Moe):
                prepare(block)
        config = loaded.model.config
        pool = torch.zeros(1, config.num_layers, 2, config.num_kv_heads, 8, 128)
        assert is_plain(loaded.model, pool)
        shape = shape_of(config, 8, 132, is_quantized)
        numbers = (torch.tensor([each], dtype=torch.int32) for each in (0, 1, 0))
        inputs = torch.tensor([5]), *numbers, torch.zeros(1, 1, dtype=torch.int32)
        hidden.append(decode_reference(shape, parameters_of(loaded.model), pool, *inputs))
    assert torch.equal(hidden[0], hidden[1])


def in_e4m3(layer: Linear, is_quantized: bool) -> Linear:
    """Round the layer to e4m3. Returns it with scales, or dequantized."""
    scales = layer.weight.abs().amax(-1) / 448
    weight = (layer.weight / scales[:, None]).to(torch.float8_e4m3fn)
    return (
        Linear(weight, layer.bias, scales=scales)
        if is_quantized
        else Linear(weight.float() * scales[:, None], layer.bias)
    )


@pytest.mark.parametrize(
    ("changes", "is_on"),
    [
        ({"attention_bias": True}, True),
        ({"head_dim": 64}, True),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, True),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": True}, True),
        ({}, False),
    ],
    ids=["a bias of the output", "heads", "windows", "biases of the MLP", "switched off"],
)
def test_no_kernel_where_it_takes_no_such_model_or_is_switched_off(
    changes: dict[str, Any], is_on: bool, tmp_path: Path, steps: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, {**HEADS, **changes})
    made, _ = open_gpu(path, monkeypatch, GpuConfig(), dtype=DTYPE, persistent_kernel=is_on)
    generate(made, [GREEDY], PROMPTS[:1])
    assert not steps

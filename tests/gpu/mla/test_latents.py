"""DeepSeek's models on the GPU engine against the plain float32 engine: latents and all kinds of routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.config import GpuConfig
from engine.gpu.attention.backend import GpuInputs
from engine.mla import gpu_expanded as expanded
from engine.mla.config import LatentConfig
from engine.mla.gpu_attention import LatentQueries
from engine.mla.gpu_expanded import ExpandedLatents, is_cheaper_expanded, open_latents, try_widths
from engine.mla.gpu_latents import AbsorbedPlan, ExpandedPlan
from engine.mla.latent_attention import LatentAttention
from kernels.paged_attention import attend_causally
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.test_engine import PROMPTS, generate, greedy, open_gpu, reference
from tests.kernels.helpers import BFLOAT16_BOUND, HALF_DTYPE, block_tables_for, relative_error

V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "head_dim": None,
}  # fmt: skip
V3 = {
    **V2, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 24,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("changes", [V2, V3], ids=["v2", "v3"])
def test_greedy_tokens_equal_those_of_the_plain_engine(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks next to decode rows, contexts of several blocks and several splits."""
    use_small_tiles(monkeypatch, 4)
    model = save_family(tmp_path, changes)
    expected = generate(reference(model), greedy())
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), max_num_batched_tokens=16)
    assert runner._pool.shape[2:4] == (1, 1)
    assert runner._pool.shape[5] == 48
    assert generate(made, greedy()) == expected


def test_expanded_prompts_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks are expanded: whole prompts, chunks after others and after a cached prefix, next to decode rows."""
    use_small_tiles(monkeypatch, 4)
    monkeypatch.setattr(expanded, "is_cheaper_expanded", lambda *_: True)
    seen: set[tuple[bool, bool]] = set()  # (decode rows next to chunks, keys before them)
    attend = LatentQueries.attend

    def watched(
        own: LatentQueries, inputs: GpuInputs, block: LatentAttention, q: Tensor, latents: Tensor
    ) -> Tensor:  # fmt: skip
        plan = inputs.groups[0].prefill
        if plan is not None:
            assert isinstance(plan, ExpandedPlan)
            num_decode = inputs.lengths.shape[0]
            seen.add((num_decode > 0, plan.blocks.shape[0] > q.shape[0] - num_decode))
        return attend(own, inputs, block, q, latents)

    monkeypatch.setattr(LatentQueries, "attend", watched)
    model = save_family(tmp_path, V2)
    wanted = generate(reference(model), greedy(2), PROMPTS[:3])
    gpu = GpuConfig(use_cuda_graph=False)
    made, _ = open_gpu(model, monkeypatch, gpu, max_num_batched_tokens=24, block_size=8)
    assert generate(made, greedy(2), PROMPTS[:3]) == wanted
    assert generate(made, greedy(2)[:2], PROMPTS[1:3]) == wanted[1:]
    assert made.kv.stats.hit_tokens > 0
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


LATENT = LatentConfig(None, kv_lora_rank=32, nope_head_dim=16, rope_head_dim=16, v_head_dim=32)
DEEPSEEK = LatentConfig(None, 512, 128, 64, 128)


@pytest.mark.parametrize(
    ("queries", "keys", "is_expanded"),
    [
        ([1], [1], True), ([2048], [8192], True), ([172], [100_000], True), ([170], [100_000], False),
        ([64], [64], True), ([64], [83], True), ([64], [84], False), ([16], [4096], False),
        ([64, 2048], [8192, 2048], True),
    ],
)  # fmt: skip
def test_the_cheaper_form(queries: list[int], keys: list[int], is_expanded: bool) -> None:
    starts = [*accumulate(queries, initial=0)]
    assert is_cheaper_expanded(DEEPSEEK, starts, keys) == is_expanded


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, softmax_scale: float, is_causal: bool, num_splits: int,
) -> None:  # fmt: skip
    """Compute FlashAttention-3 for rows, or a batch of one, with values wider or narrower than keys."""
    assert is_causal
    if cu_seqlens_q is None or cu_seqlens_k is None:
        assert max_seqlen_q is max_seqlen_k is None
        [q], [k], [v], [out] = q, k, v, out
        cu_seqlens_q, cu_seqlens_k = torch.tensor([0, len(q)]), torch.tensor([0, len(k)])
        max_seqlen_q, max_seqlen_k = len(q), len(k)
    rows = list(zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True))
    assert max_seqlen_q == max(stop - start for (start, stop), _ in rows)
    assert max_seqlen_k == max(stop - start for _, (start, stop) in rows)
    for own, keys in rows:
        scaled = q[slice(*own)] * softmax_scale * q.shape[2] ** 0.5  # it divides by the root of the width
        out[slice(*own)] = attend_causally(scaled, k[slice(*keys)].transpose(0, 1), v[slice(*keys)].transpose(0, 1))


def prompts_over_latents(
    queries: Sequence[int], keys: Sequence[int], num_heads: int, device: torch.device, kv_dtype: torch.dtype,
    dtype: torch.dtype,
) -> SimpleNamespace:  # fmt: skip
    """Make rotated queries, a pool of latents, and float64 attention over expanded keys and values."""
    dims = LATENT.nope_head_dim, LATENT.v_head_dim
    tables, table = block_tables_for(list(keys), 16, device)
    pool = torch.full((sum(map(len, tables)), 2, 1, 1, 16, 48), float("nan"), device=device).to(kv_dtype)
    starts = [*accumulate(queries, initial=0)]
    q = torch.randn(starts[-1], num_heads, 32, device=device).to(dtype)
    kv_b = (torch.randn(num_heads * sum(dims), 32, device=device) / 32**0.5).to(dtype)
    wanted = []
    for row, (ids, seq_len) in enumerate(zip(tables, keys, strict=True)):
        latents = torch.randn(seq_len, 48, device=device).to(kv_dtype)
        for token in range(seq_len):
            pool[ids[token // 16], 1, 0, 0, token % 16] = latents[token]
        latents = latents.float()
        kv = (latents[:, :32].double() @ kv_b.double().T).view(seq_len, num_heads, -1).transpose(0, 1)
        k = torch.cat([kv[..., : dims[0]], latents[:, 32:].double().expand(num_heads, -1, -1)], dim=2)
        own = q[starts[row] : starts[row + 1]].double()  # LATENT's scale is 1 / root of the width
        wanted.append(attend_causally(own, k, kv[..., dims[0] :]))
    return SimpleNamespace(q=q, kv_b=kv_b, pool=pool, table=table, starts=starts, wanted=torch.cat(wanted))


@pytest.mark.parametrize("flash", [None, flash_forward], ids=["ours", "fa3"])
@pytest.mark.parametrize(
    ("queries", "keys", "kv_dtype"),
    [
        ([140, 20, 1], [140, 95, 33], torch.float32), ([30], [75], torch.float32),
        ([30, 9], [75, 9], torch.float8_e4m3fn), ([140, 20], [140, 95], HALF_DTYPE),
    ],
)  # fmt: skip
def test_both_kernels_attend_to_expanded_keys(
    flash: Any, queries: list[int], keys: list[int], kv_dtype: torch.dtype
) -> None:
    """More than a tile of queries, a later chunk, one token; with any data after the buffer's last keys."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = HALF_DTYPE if kv_dtype == HALF_DTYPE else torch.float32
    case = prompts_over_latents(queries, keys, 3, device, kv_dtype, dtype)
    backend = ExpandedLatents(case.pool, 3, LATENT, dtype, flash, max_bytes=1 << 20)
    plan = backend.plan_expanded(case.starts, keys, case.table)
    out = torch.full((sum(queries), 3, 32), float("nan"), device=device).to(dtype)
    for buffer in (backend._kv, backend._latents):
        buffer.fill_(float("nan"))
    backend.attend(case.q, case.kv_b, case.pool, 1, plan, out)
    assert relative_error(out, case.wanted) < (1e-5 if dtype == torch.float32 else BFLOAT16_BOUND)


def test_more_keys_than_the_buffer_holds_are_absorbed() -> None:
    pool = torch.zeros(20, 1, 1, 1, 16, 48)
    backend = ExpandedLatents(pool, 3, LATENT, torch.float32, max_bytes=100 * (48 + 3 * 48) * 4)
    table = torch.zeros(1, 20, dtype=torch.int32)
    assert isinstance(backend.plan([0, 100], [100], table), ExpandedPlan)
    assert isinstance(backend.plan([0, 101], [101], table), AbsorbedPlan)


def test_a_package_without_these_widths_is_found_out() -> None:
    try_widths(flash_forward, (128, 64, 128), torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="wrong numbers for heads of 192 and 128"):
        try_widths(lambda *_, **__: None, (128, 64, 128), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["cudnn", "fa3"])
def test_backends_that_do_not_take_latents_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        open_latents(name, torch.zeros(2, 1, 1, 1, 16, 48), 3, LATENT, torch.float32)

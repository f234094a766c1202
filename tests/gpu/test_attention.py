"""Every backend against plain attention: the real one on a GPU that has it, otherwise torch with its contract."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError
from engine.gpu.attention.backend import PagedAttention, PagedPlan, PrefillAttention
from engine.gpu.attention.grouped import open_attention
from engine.prefill_backends import choose as chooser
from engine.prefill_backends import contiguous, fa3
from engine.prefill_backends.choose import choose
from engine.prefill_backends.cudnn import CudnnAttention, attend_with_cudnn, rounded_lengths, rounded_up
from engine.prefill_backends.fa3 import FlashAttention3, FlashPlan, Operator, TablePlan
from engine.prefill_backends.facts import Facts
from kernels.paged_attention import attend_causally
from tests.kernels.helpers import block_tables_for, fill_sequence, poisoned_pool, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BOUND = 1e-2 if ON_GPU else 1e-5
BLOCK_SIZE = 64 if ON_GPU else 16
H200 = Facts(torch.bfloat16, torch.bfloat16, 128, 64, (9, 0), frozenset({"fa3", "cudnn"}))
NO_FA3, NO_CUDNN = frozenset({"cudnn"}), frozenset({"fa3"})


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, seq_lens: Tensor, tables: Tensor, max_queries: int | None
) -> Tensor:
    """Attend causally for packed rows, aligned to the last query. K, V: (blocks, block size, KV heads, head_dim)."""
    out = torch.empty_like(q)
    places = starts.tolist()
    assert max_queries == max(b - a for a, b in pairwise(places))
    assert starts.dtype == seq_lens.dtype == tables.dtype == torch.int32
    for row, seq_len in enumerate(seq_lens.tolist()):
        ids = tables[row, : -(-seq_len // k.shape[1])].long()
        kv = torch.stack([k[ids], v[ids]]).flatten(1, 2)[:, :seq_len].transpose(1, 2)
        own = slice(*places[row : row + 2])
        out[own] = attend_causally(q[own], *kv)
    return out


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_scale: float, is_causal: bool, num_splits: int,
    cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None, seqused_k: Tensor | None = None, page_table: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute FlashAttention-3's `fwd` for the arguments that are used."""
    assert is_causal
    assert num_splits == 0
    assert softmax_scale == pytest.approx(q.shape[-1] ** -0.5)
    if page_table is not None:
        assert cu_seqlens_q is not None
        assert seqused_k is not None
        out.copy_(attend_pages(q, k, v, cu_seqlens_q, seqused_k, page_table, max_seqlen_q))
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out[0] = attend_causally(q[0], *torch.stack([k[0], v[0]]).transpose(1, 2))
        return
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(starts))
    assert max_seqlen_k == max(b - a for a, b in pairwise(key_starts))
    for row in range(len(starts) - 1):
        own, keys = slice(*starts[row : row + 2]), slice(*key_starts[row : row + 2])
        out[own] = attend_causally(q[own], *torch.stack([k[keys], v[keys]]).transpose(1, 2))


def make(name: str, pool: Tensor, num_heads: int, max_tokens: int) -> PrefillAttention:
    """Make a backend. Small prompts use cuDNN too, so that it is tested on a CPU."""
    if name == "triton":
        return PagedAttention(num_heads, pool.shape[3])
    if name == "cudnn":
        plain = functools.partial(functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        attend = attend_with_cudnn if ON_GPU else plain
        return CudnnAttention(attend, pool, num_heads, pool.dtype, max_tokens, min_tokens=20)
    operator = Operator(flash_forward, follows_tables=True)
    if ON_GPU:
        if not fa3.installed_package():
            pytest.skip("FlashAttention-3 is not installed")
        operator = fa3.load()
    if name == "fa3":
        operator = Operator(operator.forward, follows_tables=False)
    elif not operator.follows_tables:
        pytest.skip("this build has no block tables")
    return FlashAttention3(operator, pool, num_heads, DTYPE)


class Step:
    """A pool with K and V of rows, and the q/k/v output of the tokens that a step computes."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, query_lens: Sequence[int], seq_lens: Sequence[int],
        kv_dtype: torch.dtype = DTYPE,
    ) -> None:  # fmt: skip
        tables, self.block_tables = block_tables_for(list(seq_lens), BLOCK_SIZE, DEVICE)
        self.pool = poisoned_pool(sum(map(len, tables)), 2, num_kv_heads, BLOCK_SIZE, head_dim, kv_dtype, DEVICE)
        self.num_heads = num_heads
        self.starts = list(accumulate(query_lens, initial=0))
        self.seq_lens = list(seq_lens)
        qkv = torch.randn(self.starts[-1], num_heads + 2 * num_kv_heads, head_dim, device=DEVICE)
        self.qkv = qkv.to(DTYPE)
        self.expected = torch.empty(self.starts[-1], num_heads * head_dim, dtype=torch.float64, device=DEVICE)
        for row, (ids, seq_len) in enumerate(zip(tables, seq_lens, strict=True)):
            kv = fill_sequence(self.pool, 1, ids, seq_len)
            own = slice(self.starts[row], self.starts[row + 1])
            new = kv[:, :, seq_len - query_lens[row] :].permute(2, 0, 1, 3)
            self.qkv[own, num_heads:] = new.flatten(1, 2).to(DTYPE)
            self.expected[own] = attend_causally(self.qkv[own, :num_heads].double(), *kv.double()).flatten(1)

    def run(self, backend: PrefillAttention) -> Tensor:
        plan = backend.plan(self.starts, self.seq_lens, self.block_tables)
        out = torch.full(self.expected.shape, float("nan"), dtype=DTYPE, device=DEVICE)
        plan.attend(self.qkv, self.pool, 1, out)
        return out


def worst_token(out: Tensor, expected: Tensor) -> float:
    """Return a token's largest error: late tokens, means of many values, are too small to show in the total norm."""
    return float(((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


SCALE = 17 if ON_GPU else 1
ROWS = {
    "prompt": ([25], [25]),
    "chunk": ([13], [50]),
    "prompts": ([25, 1, 40, 7], [25, 1, 40, 7]),
    "mixed": ([25, 13, 1], [25, 50, 33]),
}
UNEVEN = [7, 64, 65, 300, 511, 1030]  # ends before, at and after the edges of tiles


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(7, 1, 64), (4, 2, 128)])
@pytest.mark.parametrize("name", ["triton", "fa3", "cudnn"])
def test_equals_plain_attention(name: str, num_heads: int, num_kv_heads: int, head_dim: int, rows: str) -> None:
    query_lens, seq_lens = ([SCALE * length for length in lengths] for lengths in ROWS[rows])
    step = Step(num_heads, num_kv_heads, head_dim, query_lens, seq_lens)
    backend = make(name, step.pool, num_heads, sum(query_lens))
    assert backend.name == name
    assert worst_token(step.run(backend), step.expected) < BOUND


@pytest.mark.parametrize(
    ("num_heads", "follows", "kind"), [(2, 30, TablePlan), (4, 30, FlashPlan), (2, 31, FlashPlan)]
)
def test_few_queries_over_a_cached_context_are_not_gathered_for(
    num_heads: int, follows: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are counted times the query heads per KV head: all these rows read the same K and V."""
    monkeypatch.setattr(fa3, "MAX_PAGED_HEADS", 60)
    step = Step(num_heads, 1, 64, [follows, 7], [50, 30])
    backend = make("fa3 pages", step.pool, num_heads, 64)
    assert isinstance(backend.plan(step.starts, step.seq_lens, step.block_tables), kind)
    assert worst_token(step.run(backend), step.expected) < BOUND


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes minutes")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(28, 4), (16, 8)])
@pytest.mark.parametrize("name", ["triton", "fa3"])
def test_every_token_of_prompts_of_uneven_lengths(name: str, num_heads: int, num_kv_heads: int) -> None:
    step = Step(num_heads, num_kv_heads, 128, UNEVEN, UNEVEN)
    assert worst_token(step.run(make(name, step.pool, num_heads, sum(UNEVEN))), step.expected) < BOUND


@pytest.mark.parametrize("num_queries", UNEVEN)
def test_plain_attention_in_float32_equals_float64(num_queries: int) -> None:
    """The reference of benchmarks; torch has kernels for float32 on a GPU, none for float64."""
    q = torch.randn(num_queries, 7, 128, device=DEVICE)
    kv = torch.randn(2, 1, num_queries, 128, device=DEVICE)
    expected = attend_causally(q.double(), *kv.double()).flatten(1)
    assert worst_token(attend_causally(q, *kv).flatten(1), expected) < 1e-4


@pytest.mark.parametrize(("name", "seq_len"), [("fa3", 80), ("cudnn", 70)])
def test_what_a_larger_step_left_in_the_buffers_is_not_seen(name: str, seq_len: int) -> None:
    large = Step(4, 2, 64, [70 * SCALE], [seq_len * SCALE])
    for tensor in (large.qkv, large.pool):
        tensor.fill_(float("nan"))
    backend = make(name, large.pool, 4, 100 * SCALE)
    large.run(backend)
    for query_len, keys in ((21, 21), (33, 33), (9, 30)):
        step = Step(4, 2, 64, [query_len * SCALE], [keys * SCALE])
        assert relative_error(step.run(backend), step.expected) < BOUND


@pytest.mark.parametrize(("query_len", "seq_len"), [(25, 25), (9, 30)])
def test_what_was_rounded_to_8_bits_counts_also_without_context(query_len: int, seq_len: int) -> None:
    step = Step(4, 2, 64, [query_len * SCALE], [seq_len * SCALE], torch.float8_e4m3fn)
    step.qkv[:, 4:] = float("nan")
    backend = make("fa3", step.pool, 4, 100 * SCALE)
    assert relative_error(step.run(backend), step.expected) < BOUND


def test_more_context_than_the_buffer_holds_is_read_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(4, 2, 64, [9, 5], [30, 5])
    size = 35 * 2 * 2 * 64 * DTYPE.itemsize
    for max_bytes, is_paged in ((size - 1, True), (size, False)):
        monkeypatch.setattr(fa3, "KeyBuffer", functools.partial(contiguous.KeyBuffer, max_bytes=max_bytes))
        backend = make("fa3", step.pool, 4, 64)
        plan = backend.plan(step.starts, step.seq_lens, step.block_tables)
        assert isinstance(plan, PagedPlan) == is_paged
        assert relative_error(step.run(backend), step.expected) < BOUND
        assert not isinstance(backend.plan([0, 40], [40], step.block_tables[:1]), PagedPlan)  # nothing to gather


def test_lengths_are_rounded_to_eight_per_octave() -> None:
    assert [rounded_up(n) for n in (1, 7, 8, 9, 16, 17, 4096, 4097, 8192, 8193)] == [
        1, 7, 8, 9, 16, 18, 4096, 4608, 8192, 9216,
    ]  # fmt: skip
    assert list(rounded_lengths(4096, 8192)) == [4096, 4608, 5120, 5632, 6144, 6656, 7168, 7680, 8192]
    assert {rounded_up(n) for n in range(20, 301)} == set(rounded_lengths(20, 300))
    assert all(n <= rounded_up(n) <= n * 9 / 8 + 1 for n in range(1, 5000))


def changed(**facts: Any) -> Facts:
    return Facts(**{**{name: getattr(H200, name) for name in Facts.__slots__}, **facts})


def test_automatic_choice_takes_what_is_fastest_and_fits() -> None:
    assert choose("auto", H200) == "fa3"
    assert choose("auto", changed(installed=NO_FA3)) == "cudnn"
    assert choose("auto", changed(dtype=torch.float16, kv_dtype=torch.float16)) == "cudnn"
    assert choose("auto", changed(kv_dtype=torch.float8_e4m3fn)) == "fa3"
    for other in (
        changed(installed=frozenset()),
        changed(capability=(8, 0)),  # not measured there
        changed(capability=None),
        changed(kv_dtype=torch.float8_e4m3fn, installed=NO_FA3),
        changed(dtype=torch.float32, kv_dtype=torch.float32),
        changed(head_dim=256),
    ):
        assert choose("auto", other) == "triton"


@pytest.mark.parametrize(
    ("name", "facts", "told"),
    [
        ("fa3", {"installed": NO_FA3}, "--attention-backend fa3 is not installed; run: pip install fa3-fwd"),
        ("fa3", {"capability": (12, 0)}, "compute capability 8 or 9"),
        ("fa3", {"dtype": torch.float16}, "bfloat16 alone"),
        ("fa3", {"head_dim": 80}, "not 80"),
        ("cudnn", {"installed": NO_CUDNN}, "cuDNN"),
        ("cudnn", {"kv_dtype": torch.float8_e4m3fn}, "16-bit"),
        ("cudnn", {"head_dim": 256}, "not 256"),
    ],
)
def test_a_named_backend_that_cannot_work_says_what_to_do(name: str, facts: dict[str, Any], told: str) -> None:
    assert choose(name, H200) == name
    with pytest.raises(ConfigError, match=told):
        choose(name, changed(**facts))
    assert choose("triton", changed(**facts)) == "triton"


def test_a_package_that_does_not_load_is_an_error_only_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(chooser, "facts_of", lambda *_: H200)
    monkeypatch.setattr(fa3, "load", broken)
    pool = torch.zeros(1, 1, 2, 2, 16, 64)
    with caplog.at_level(logging.WARNING):
        assert open_attention("auto", pool, 4, torch.bfloat16, 64).name == "triton"
    assert "undefined symbol" in caplog.text
    with pytest.raises(ConfigError, match="fa3 does not work here: undefined symbol"):
        open_attention("fa3", pool, 4, torch.bfloat16, 64)


def test_memory_that_a_backend_lacks_is_no_reason_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("tried to allocate 512 MiB")

    monkeypatch.setattr(chooser, "facts_of", lambda *_: H200)
    monkeypatch.setattr(fa3, "load", full)
    with pytest.raises(torch.OutOfMemoryError):
        open_attention("auto", torch.zeros(1, 1, 2, 2, 16, 64), 4, torch.bfloat16, 64)

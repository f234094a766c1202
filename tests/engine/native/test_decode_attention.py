"""CPU attention: decode in C, in every variant that this CPU runs, and without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.model_files import ModelFiles
from engine.native import attention
from kernels.native.chunk_attention import padded_len
from kernels.native.decode_attention import DecodeAttention, Queries, supports
from kernels.native.library import library
from kernels.paged_attention import attend_causally, gather_kv, write_kv
from tests.engine.driving import Driver, make_runner, open_model, random_prompt
from tests.engine.native.native import native_variant, needs_library  # noqa: F401 - a fixture
from tests.engine.tiny_models import VOCAB_SIZE, TinyModel

LAYER = 1
SHAPES = [(4, 2, 16, 4), (9, 3, 64, 16), (14, 2, 64, 16), (8, 8, 128, 32), (6, 2, 24, 16), (2, 1, 256, 1)]
"""Query heads, KV heads, head_dim, block size."""


class Step:
    """Decode rows over random blocks; `lengths` are the numbers of keys that queries see, including their own."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, lengths: list[int]) -> None:
        num_heads, kv_heads, head_dim, block_size = shape
        torch.manual_seed(0)
        counts = [-(-length // block_size) for length in lengths]
        free = torch.randperm(sum(counts) + 3).tolist()
        self.pool = torch.randn(len(free), 2, 2, kv_heads, block_size, head_dim).to(dtype)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.lengths = lengths
        places = [divmod(length - 1, block_size) for length in lengths]
        blocks = [table[place] for table, (place, _) in zip(self.tables, places, strict=True)]
        self.inputs = torch.tensor([[0] * len(lengths)] * 2 + [blocks, [offset for _, offset in places]])
        qkv = torch.randn(len(lengths), num_heads + 2 * kv_heads, head_dim).to(dtype)
        self.q, self.kv = qkv[:, :num_heads], qkv[:, num_heads:].view(-1, 2, kv_heads, head_dim)

    def attend(self, chosen: list[int] | None = None) -> Tensor:
        tokens = chosen or list(range(len(self.lengths)))
        queries = Queries(tokens, tokens, [self.lengths[token] for token in tokens], self.tables, self.inputs)
        return DecodeAttention(self.pool, self.q.shape[1])(LAYER, self.q, self.kv, queries)


@needs_library
@pytest.mark.usefixtures("native_variant")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_equal_the_formula(shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    """Also for sequences that are split into parts of 512 tokens."""
    block_size = shape[3]
    step = Step(shape, dtype, [1, 2, block_size, block_size + 1, 3 * block_size + 2, 9 * block_size, 513, 1537])
    expected_pool = step.pool.clone()
    write_kv(expected_pool, LAYER, step.kv, step.inputs[2], step.inputs[3])
    found = step.attend()
    assert found.dtype == dtype
    assert torch.equal(step.pool, expected_pool)
    for row, (table, length) in enumerate(zip(step.tables, step.lengths, strict=True)):
        held = gather_kv(expected_pool, LAYER, torch.tensor(table), length).float()
        expected = attend_causally(step.q[row : row + 1].float(), *held)
        torch.testing.assert_close(found[row : row + 1].float(), expected, atol=tolerance, rtol=tolerance)


@needs_library
@pytest.mark.usefixtures("native_variant")
def test_a_query_has_the_same_bits_among_any_others() -> None:
    """Alone on one thread, and among enough others for several threads; in one part and in three."""
    step = Step((9, 3, 64, 64), torch.bfloat16, [170, 33, 1300, 16, 900])
    together = step.attend()
    for row in range(5):
        assert torch.equal(step.attend([row])[0], together[row])


@needs_library
@pytest.mark.usefixtures("native_variant")
def test_scores_of_any_size_and_nan() -> None:
    step = Step((4, 2, 16, 4), torch.float32, [9, 9, 9])
    step.q[0] *= 1e4  # one key takes all of the weight
    step.q[1] = float("nan")
    found = step.attend()
    assert bool(found[1].isnan().all())
    assert bool(found[[0, 2]].isfinite().all())
    held = gather_kv(step.pool, LAYER, torch.tensor(step.tables[0]), 9)
    torch.testing.assert_close(found[:1], attend_causally(step.q[:1], *held))


@needs_library
def test_tokens_that_lie_apart_are_copied() -> None:
    step = Step((4, 2, 16, 4), torch.float32, [9, 5])
    expected = step.attend()
    step.q, step.kv = (each.movedim(0, -1).contiguous().movedim(-1, 0) for each in (step.q, step.kv))
    assert step.q.stride(-1) != 1
    assert torch.equal(step.attend(), expected)


def test_padded_lengths_of_prompts_are_few() -> None:
    """The GEMM library compiles a program for each length."""
    lengths = {padded_len(num_keys) for num_keys in range(1, 8193)}
    assert len(lengths) < 50
    assert all(padded_len(num_keys) >= num_keys for num_keys in range(1, 8193))


def test_pools_that_it_does_not_take() -> None:
    shape = (4, 1, 2, 2, 4, 16)
    assert supports(torch.zeros(shape), 4) == (library() is not None)
    assert not supports(torch.zeros(shape), 2 * 65)  # heads that share a KV head
    for pool in (
        torch.zeros(shape, dtype=torch.float16),
        torch.zeros(*shape[:5], 512),
        torch.zeros(4, 1, 1, 2, 4, 16),  # one plane, of latents
        torch.zeros(shape, device="meta"),
    ):
        assert not supports(pool, 4)


def test_tokens_without_a_compiler_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where rounding changes no token."""
    files = ModelFiles("model", "directory", TinyModel("Qwen3").save(tmp_path / "model"))
    found, backends = [], []
    for has_compiler in (True, False):
        if not has_compiler:
            monkeypatch.setattr(attention, "supports", lambda *_: False)
        loaded_model, config = open_model(files, dtype="float32")
        made = make_runner(loaded_model, config)
        backends.append(made.attention_backend)
        driver = Driver(made, config)
        requests = [driver.add(random_prompt(length, VOCAB_SIZE, length)) for length in (5, 19)]
        driver.finish(requests, 12, chunk=8)
        found.append([request.output_token_ids for request in requests])
    assert found[0] == found[1]
    assert backends == ["native" if library() is not None else "pool", "pool"]

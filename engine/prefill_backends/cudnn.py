"""cuDNN's attention through torch, for long prompts without cached context; our paged kernel for all other rows.

cuDNN makes a plan for each shape (30 to 40 ms), so lengths are rounded up to eight per octave and all plans are made
at the start. That is safe under a causal mask as long as the added keys are finite: they are zeros. The
mask is aligned to the first key, so it is right only where queries and keys are the same tokens.

At 28 heads x 128, TFLOP/s of cuDNN and of the paged kernel: 2k 398 and 322; 8k 598 and 436. With longer rows (13%
more work on average) and a copy, cuDNN wins from about 4k on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.gpu.attention.backend import PagedAttention, PagedPlan
from engine.prefill_backends.facts import Facts

MIN_TOKENS = 4096
HALF_TYPES = (torch.bfloat16, torch.float16)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (1, heads, n, head_dim), fewer KV heads -> like q


def attend_with_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Raises RuntimeError where cuDNN cannot."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def is_installed(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.backends.cudnn.version() is not None  # type: ignore[no-untyped-call]


def why_not(facts: Facts) -> str:
    """See `choose.py`."""
    if facts.capability is None or facts.capability[0] < 8 or CudnnAttention.name not in facts.installed:
        return "needs an NVIDIA GPU of compute capability 8 or more and cuDNN; use triton"
    if facts.dtype not in HALF_TYPES or facts.kv_dtype != facts.dtype:
        return "takes 16-bit numbers and KV alone; use triton"
    return "" if facts.head_dim <= 128 else f"takes heads up to 128, not {facts.head_dim}; use triton"


def open_backend(pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int) -> CudnnAttention:
    """See `choose.py`."""
    return CudnnAttention(attend_with_cudnn, pool, num_heads, dtype, max_tokens)


def rounded_up(num_tokens: int) -> int:
    """The next of eight lengths per octave."""
    step = 1 << max((num_tokens - 1).bit_length() - 4, 0)
    return -(-num_tokens // step) * step


def rounded_lengths(first: int, last: int) -> Iterator[int]:
    """All lengths that `rounded_up` gives for first .. last."""
    length = rounded_up(first)
    yield length
    while length < last:
        length = rounded_up(length + 1)
        yield length


@dataclass(frozen=True, slots=True)
class CudnnPlan:
    """long_rows: (first token, tokens) of rows for cuDNN. others: None when there are none."""

    backend: CudnnAttention
    long_rows: list[tuple[int, int]]
    others: PagedPlan | None

    def attend(
        self, qkv: Tensor, pool: Tensor, layer: int, out: Tensor, window: int = 0, sinks: Tensor | None = None
    ) -> None:
        """See PrefillPlan."""
        if self.others is not None:
            self.others.attend(qkv, pool, layer, out)
        for first, count in self.long_rows:
            out[first : first + count] = self.backend.attend_row(qkv[first : first + count])


class CudnnAttention:
    """attend: `attend_with_cudnn`. max_tokens: prompt tokens of the largest step."""

    name = "cudnn"

    def __init__(
        self, attend: Attend, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int,
        min_tokens: int = MIN_TOKENS,
    ) -> None:  # fmt: skip
        num_kv_heads, _, head_dim = pool.shape[3:]
        self._attend = attend
        self._min_tokens = min_tokens
        self._num_kv_heads = num_kv_heads
        self._paged = PagedAttention(num_heads, num_kv_heads)
        self._padded = torch.zeros(0)
        if max_tokens >= min_tokens:
            shape = (rounded_up(max_tokens), num_heads + 2 * num_kv_heads, head_dim)
            self._padded = torch.zeros(shape, dtype=dtype, device=pool.device)
            for length in rounded_lengths(min_tokens, max_tokens):
                self._attend_rows(self._padded[:length])

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> CudnnPlan:
        counts = [stop - start for start, stop in pairwise(query_starts)]
        is_long = [
            count == seq_len and count >= self._min_tokens for count, seq_len in zip(counts, seq_lens, strict=True)
        ]
        long_rows = [(query_starts[row], counts[row]) for row, found in enumerate(is_long) if found]
        if len(long_rows) == len(counts):
            return CudnnPlan(self, long_rows, None)
        return CudnnPlan(self, long_rows, self._paged.plan(query_starts, seq_lens, block_tables, skipped=is_long))

    def attend_row(self, qkv: Tensor) -> Tensor:
        """(n, num_heads + 2 num_kv_heads, head_dim) of a long prompt -> (n, num_heads * head_dim)."""
        count = qkv.shape[0]
        length = rounded_up(count)
        if length > count:
            self._padded[:count] = qkv
            self._padded[count:length] = 0
            qkv = self._padded[:length]
        return self._attend_rows(qkv)[:count]

    def _attend_rows(self, qkv: Tensor) -> Tensor:
        """(n, num_heads + 2 num_kv_heads, head_dim) -> (n, num_heads * head_dim)."""
        q_heads = qkv.shape[1] - 2 * self._num_kv_heads
        by_head = qkv.transpose(0, 1)[None]
        k, v = by_head[:, q_heads:].chunk(2, dim=1)
        return self._attend(by_head[:, :q_heads], k, v)[0].transpose(0, 1).flatten(1)

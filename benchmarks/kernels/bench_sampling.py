"""sample: time for a batch by kind of row, against eager torch that sorts, and against one read of the logits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.kernels.timing import eager_seconds, graph_seconds, num_input_sets, read_bandwidth, report
from kernels.gpu.sampling import choose_tokens, chunk_stats, num_chunks_of

VOCAB = 152064
KINDS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 50 top-p 0.9": (0.8, 50, 0.9, 0.0),
    "min-p 0.1": (0.8, 0, 1.0, 0.1),
}


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, seeds: Tensor,
    positions: Tensor, stats: Tensor, token_ids: Tensor,
) -> None:  # fmt: skip
    chunk_stats(logits, temperatures, seeds, positions, stats, logits.shape[1])
    choose_tokens(logits, stats, temperatures, top_ks, top_ps, min_ps, seeds, positions, token_ids)


def eager_sample(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Sample as eager servers do: softmax, sort, mask, multinomial."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_k or top_p < 1 or min_p:
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        if top_k:
            ordered[:, top_k:] = 0
        ordered[ordered.cumsum(-1) - ordered >= top_p * ordered.sum(-1, keepdim=True)] = 0
        ordered[ordered < min_p * ordered[:, :1]] = 0
        return ids.gather(1, torch.multinomial(ordered, 1))
    return torch.multinomial(probabilities, 1)


def main() -> None:
    read = read_bandwidth()
    for spread in (1.0, 4.0):  # flat logits, as from random weights, and peaked ones
        for rows in (1, 8, 64, 256):
            count = num_input_sets(2 * rows * VOCAB, 16)
            sets = [(torch.randn(rows, VOCAB, device="cuda") * spread).bfloat16() for _ in range(count)]
            workspace = torch.empty(rows, num_chunks_of(VOCAB), 4, device=sets[0].device)
            token_ids = torch.empty(rows, dtype=torch.int64, device="cuda")
            seeds = torch.randint(0, 1 << 60, (rows,), device="cuda")
            positions = torch.randint(0, 4096, (rows,), device="cuda")
            for name, kind in KINDS.items():
                dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
                columns = [
                    torch.full((rows,), value, dtype=dtype, device="cuda")
                    for value, dtype in zip(kind, dtypes, strict=True)
                ]
                arguments = *columns, seeds, positions, workspace, token_ids
                seconds = graph_seconds([functools.partial(sample, logits, *arguments) for logits in sets])
                eager = eager_seconds([functools.partial(eager_sample, logits, *kind) for logits in sets[:2]], 3)
                report(
                    "sampling", f"{name}, {rows} rows, spread {spread:g}", us=seconds * 1e6,
                    of_read=2 * rows * VOCAB / seconds / read, eager_ratio=eager / seconds,
                )  # fmt: skip


if __name__ == "__main__":
    main()

"""The KV that a head of one layer keeps for a sequence."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

FIRST_CAPACITY = 64  # tokens; grows by doubling


class HeadKv:
    """K and V, or latents, of one sequence, from the first position on that this engine computed."""

    def __init__(self) -> None:
        self.first, self.end = 0, 0  # positions
        self._held: Tensor | None = None

    def put(self, start: int, kv: Tensor) -> None:
        """Store KV (n, planes, kv_heads, head_dim) from position `start` on, and drop later positions.

        If the positions before `start` are missing, all earlier ones are dropped, too.
        """
        if not self.first <= start <= self.end:
            self.first = self.end = start
        held, size = self._held, start - self.first + kv.shape[0]
        if held is None or held.shape[2] < size:
            capacity = max(FIRST_CAPACITY, 2 * size)
            grown = kv.new_empty(*kv.shape[1:3], capacity, kv.shape[3])
            if held is not None:
                grown[:, :, : start - self.first] = held[:, :, : start - self.first]
            held = self._held = grown
        held[:, :, start - self.first : size] = kv.permute(1, 2, 0, 3)
        self.end = start + kv.shape[0]

    @property
    def held(self) -> Tensor:
        """KV (planes, kv_heads, n, head_dim) of positions `first` to `end`."""
        assert self._held is not None, "K and V of a position are put before it attends"
        return self._held[:, :, : self.end - self.first]


def attend_last(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention for a sequence's last position: (num_heads, value_dim)."""
    # Heads that share K and V are passed as queries; no mask is needed, since all have the same position.
    queries = q.view(1, keys.shape[0], -1, q.shape[1])
    return functional.scaled_dot_product_attention(queries, keys[None], values[None]).flatten(0, 2)

"""Pool a prompt's hidden states into one vector, chunk by chunk.

    last    the hidden state of the prompt's last token
    mean    the mean of those of all its tokens, in float32

Both are of the states behind the final norm, and neither is normalized: that is the router's. A vector travels as the
log-probabilities of the one token that its request samples, whose alternatives' values it is.
"""

from __future__ import annotations

from torch import Tensor

from engine.plan import ScheduledRow
from engine.request import TokenLogprobs
from engine.request_states import RequestState


def pool(row: ScheduledRow, request: RequestState, hidden: Tensor, entries: list[TokenLogprobs]) -> None:
    """Take a row's hidden states, (row.num_tokens, hidden_size), and add the vector where the prompt ends with it.

    A row that is run again, because one beside it has failed, counts once: sums are kept by their rows' starts.
    """
    if request.params.pooling == "mean":
        request.pooled = request.pooled or {}
        request.pooled[row.start] = hidden.float().sum(dim=0)
        vector = sum(request.pooled.values()) / row.stop if row.samples else None
    else:
        vector = hidden[-1].float() if row.samples else None
    if vector is not None:
        entries.append(TokenLogprobs(0, 0.0, 0, (), tuple(vector.tolist())))

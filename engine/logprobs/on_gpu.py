"""Log-probabilities of a step's sampled tokens on their way from a GPU to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gpu.ops.rules import Vocabulary
from engine.gpu.pinning import download, upload
from engine.logprobs.logprobs import LogprobTensors, logprob_tensors
from engine.request import TokenLogprobs
from engine.runner import Sampled


@dataclass(slots=True)
class PendingLogprobs:
    """Which entries of a step's `sampled` they are of, and how many alternatives of each are wanted."""

    asking: Sequence[int]
    counts: Sequence[int]
    tensors: LogprobTensors

    def entries(self, sampled: Sequence[Sampled], values: Sequence[int]) -> Iterable[tuple[int, TokenLogprobs]]:
        """By index of an entry. values: the step's tokens; valid when the step has ended."""
        token_ids = [max(values[sampled[k][0]], 0) for k in self.asking]
        return zip(self.asking, self.tensors.entries(token_ids, self.counts), strict=True)


def pending_logprobs(
    token_ids: Tensor, logits: Tensor, sampled: Sequence[Sampled], asking: Sequence[int], vocabulary: Vocabulary
) -> PendingLogprobs:
    """Compute what the entries `asking` of `sampled` want, after the step. See `StepSamples.take`."""
    sources = [sampled[k][0] for k in asking]
    own = upload(sources, torch.int64, token_ids.device)
    whole, rows = vocabulary.whole(logits, sources)
    counts = [sampled[k][2].params.logprobs or 0 for k in asking]
    chosen = whole[upload(rows, torch.int64, token_ids.device)]
    found = logprob_tensors(chosen, token_ids[own].clamp(min=0), max(counts))
    return PendingLogprobs(asking, counts, found.map(download))

"""Drafts by a head of one layer from the model's hidden states of a request and the token sampled last.

The head keeps K and V of each request from the first position on that this engine computes. It lacks the positions
that came from a prefix cache or a peer, and drafts from the text after them, with a lower acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.cpu.forward import CpuForward
from engine.models.model import Model
from engine.plan import ScheduledRow, StepResult
from engine.request import TokenId
from engine.request_states import RequestState
from engine.runner import Sampled
from engine.speculation.draft_length import DraftLengths
from engine.speculation.from_model import Drafting, FromModel, params_of_drafts
from engine.speculation.from_tokens import most_drafts
from engine.speculation.heads.kv import HeadKv
from engine.speculation.heads.watching import Residuals


class Head(Protocol):
    """One layer over sequences. At position t it reads f_t, made of the model's residuals of x_t, and the token
    x_t+1.

    Its output o_t gives the logits of x_t+2. Beyond the model's last token, o_t-1 replaces f_t. K and V of a position
    depend only on its inputs, since there is one layer; so attention is needed only when drafting, and only for the
    last position of a sequence.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers whose inputs it reads, see Proposer."""
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """(draft vocab,) int64, the model's token for each of the head's tokens; None: the vocabularies are equal."""
        ...

    def join(self, residuals: Sequence[Tensor]) -> Tensor:
        """Compute f (n, hidden) from the residuals that enter `layers`, (n, model's hidden) each."""
        ...

    def inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Compute the layer's inputs (n, in). token_ids: (n,), of each next position; hidden: f, or o for drafts."""
        ...

    def keys_and_values(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Compute the KV to keep (n, planes, kv_heads, head_dim) for positions (n,)."""
        ...

    def outputs(self, inputs: Tensor, hidden: Tensor, positions: Tensor, kvs: Sequence[HeadKv]) -> Tensor:
        """Compute o (n, hidden) for the last position of each sequence, whose K and V are in its `kvs` already."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Compute logits (n, draft vocab)."""
        ...


@dataclass(slots=True, frozen=True)
class Positions:
    """Positions of a sequence from `start` on, and f (n, hidden) of each."""

    start: int
    hidden: Tensor


@dataclass(slots=True)
class Followed(Drafting):
    """A request as the head follows it. state: the known tokens, followed by drafts."""

    state: RequestState
    most: int  # most drafts
    kv: HeadKv = field(default_factory=HeadKv)
    fresh: Positions | None = None  # positions of the row that is being sampled
    last: tuple[Tensor, Tensor] | None = None  # the layer's inputs and f at the position before the last token

    def update(self, token_ids: Sequence[TokenId]) -> None:
        """Add the tokens sampled since."""
        self.state.token_ids[self.num_known :] = token_ids[self.num_known :]
        self.num_known = len(token_ids)


class FromHead(FromModel):
    """Proposes the drafts of a head."""

    def __init__(self, head: Head, lengths: DraftLengths, num_tokens: int, vocab_size: int) -> None:
        """num_tokens: most drafts of a row. vocab_size: of the model."""
        super().__init__(lengths)
        self.layers = head.layers
        self._head, self._num_tokens, self._vocab_size = head, num_tokens, vocab_size
        self._residuals = Residuals(head.layers)

    def watch(self, model: Model, forward: CpuForward) -> CpuForward:
        """See Proposer."""
        return self._residuals.watch(model, forward)

    def observe(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> None:
        """See Proposer. Computes K and V of prompt chunks; sampled rows wait for their next token."""
        began = time.monotonic()
        residuals = self._residuals.take()
        entries: list[tuple[Followed, ScheduledRow, RequestState]] = []
        tokens: list[int] = []  # indices of their tokens in the step
        end = 0
        for row, request in zip(rows, requests, strict=True):
            begin, end = end, end + row.num_tokens
            followed = self._follow(request)
            if followed is not None:
                entries.append((followed, row, request))
                tokens += range(begin, end)
        if entries:
            hidden = self._head.join(residuals if len(tokens) == end else [each[tokens] for each in residuals])
            end = 0
            for followed, row, _ in entries:
                begin, end = end, end + row.num_tokens
                followed.fresh = Positions(row.start, hidden[begin:end])
        known = [(followed, request) for followed, row, request in entries if not row.samples]
        for followed, request in known:
            followed.update(request.token_ids)
        self._take([followed for followed, _ in known])
        self._lengths.exclude(time.monotonic() - began)

    def propose(self, found: StepResult, sampled: Sequence[Sampled]) -> None:
        """See Proposer."""
        began = time.monotonic()
        rows: dict[int, Followed] = {}
        for _, row, request, _, _ in sampled:
            followed = request.drafter
            if row in rows or not isinstance(followed, Followed) or not found.token_ids[row]:
                continue
            self._acceptance.learn(followed.record, found.token_ids[row])
            followed.begin()
            followed.update(request.token_ids)
            rows[row] = followed
        self._take(list(rows.values()))
        self._draft([each for each in rows.values() if self._is_worth_drafting(each, len(rows))], len(rows))
        for row, followed in rows.items():
            if followed.drafts.token_ids:
                found.drafts[row] = followed.taken()
        self._lengths.exclude(time.monotonic() - began)

    def _follow(self, request: RequestState) -> Followed | None:
        """Return the request as followed; None if nothing will be drafted for it."""
        if request.drafter is None and not (request.prefill_only or request.params.pooling):
            most = most_drafts(request, self._num_tokens)
            if most:
                params = params_of_drafts(request.params, self._vocab_size)
                state = RequestState(request.request_id, [], request.num_prompt_tokens, params)
                request.drafter = Followed(state, most)
        return request.drafter if isinstance(request.drafter, Followed) else None

    def _take(self, all_followed: Sequence[Followed]) -> None:
        """Compute K and V of fresh positions whose next token is known."""
        taken: list[tuple[Followed, Positions]] = []
        for followed in all_followed:
            fresh, followed.fresh, followed.last = followed.fresh, None, None
            if fresh is not None:
                hidden = fresh.hidden[: max(followed.num_known - 1 - fresh.start, 0)]
                if hidden.shape[0]:
                    taken.append((followed, Positions(fresh.start, hidden)))
        if not taken:
            return
        token_ids: list[TokenId] = []
        positions: list[int] = []
        for followed, new in taken:
            stop = new.start + new.hidden.shape[0]
            token_ids += followed.state.token_ids[new.start + 1 : stop + 1]
            positions += range(new.start, stop)
        hidden = torch.cat([new.hidden for _, new in taken])
        inputs = self._head.inputs(torch.tensor(token_ids), hidden)
        kv = self._head.keys_and_values(inputs, torch.tensor(positions))
        end = 0
        for followed, new in taken:
            begin, end = end, end + new.hidden.shape[0]
            followed.kv.put(new.start, kv[begin:end])
            followed.last = inputs[end - 1], hidden[end - 1]

    def _draft(self, wanted: Sequence[Followed], num_rows: int) -> None:
        """Draft for these requests. num_rows: of the step."""
        drafting = [followed for followed in wanted if followed.last is not None]
        if not drafting:
            return
        lasts = [followed.last for followed in drafting if followed.last is not None]
        inputs, hidden = torch.stack([each[0] for each in lasts]), torch.stack([each[1] for each in lasts])
        for followed in drafting:
            followed.probability = 1.0
        while True:
            began = time.monotonic()
            positions = torch.tensor([followed.kv.end - 1 for followed in drafting])
            outputs = self._head.outputs(inputs, hidden, positions, [followed.kv for followed in drafting])
            going = self._add_samples(drafting, self._head.logits(outputs))
            self._times.observe(len(drafting), 0, time.monotonic() - began)
            least = self._least_probability(num_rows, len(drafting))
            going = [
                index
                for index in going
                if len(drafting[index].drafts.token_ids) < drafting[index].most
                and drafting[index].probability > least
            ]
            if not going:
                return
            drafting, hidden = [drafting[index] for index in going], outputs[going]
            inputs = self._head.inputs(torch.tensor([each.state.token_ids[-1] for each in drafting]), hidden)
            kv = self._head.keys_and_values(inputs, torch.tensor([each.kv.end for each in drafting]))
            for followed, own in zip(drafting, kv.unbind(), strict=True):
                followed.kv.put(followed.kv.end, own[None])

    def _add_samples(self, drafting: Sequence[Followed], logits: Tensor) -> list[int]:
        """Add a draft to each request. Returns the indices of the requests that got one."""
        got = []
        for index, (token_id, logprob, distribution) in enumerate(self._sampled(drafting, logits.float())):
            if token_id >= 0:
                self._add_draft(drafting[index], token_id, logprob, distribution)
                drafting[index].state.token_ids.append(token_id)
                got.append(index)
        return got

    def _sampled(self, drafting: Sequence[Followed], logits: Tensor) -> list[tuple[TokenId, float, Tensor | None]]:
        """Sample a token of the model for each request, negative if there is none. Returns it with its
        log-probability and, if it is kept, the distribution that it was drawn from.
        """
        own_ids = self._head.token_ids
        states = [followed.state for followed in drafting]
        if all(state.params.temperature == 0 and not state.changes_logits for state in states):
            best, indices = logits.max(dim=-1)
            token_ids = indices if own_ids is None else own_ids[indices]
            logprobs = (best - logits.logsumexp(dim=-1)).nan_to_num_(nan=float("-inf"))
            return [(*entry, None) for entry in zip(token_ids.tolist(), logprobs.tolist(), strict=True)]
        if own_ids is not None:  # the other tokens' logits do not matter, since the head cannot propose them
            whole = logits.new_full((len(states), self._vocab_size), float("-inf"))
            whole[:, own_ids] = logits
            logits = whole
        found = self._sampler.sample(logits, states, [len(state.token_ids) for state in states])
        known = {index: entry.logprob for index, entry in found.logprobs}
        pairs = zip(found.token_ids, self._sampler.distributions, strict=True)
        return [(token_id, known.get(k, float("-inf")), kept) for k, (token_id, kept) in enumerate(pairs)]

"""Estimates how likely drafts are accepted, from all that were proposed, whether or not a step computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Drafts, TokenId

PRIOR = 0.5  # acceptance of a kind of drafts without observations
FADE_OF_KIND = 0.99  # weight of an observation after the next one of its kind
FADE_OF_REQUEST = 0.9
WEIGHT_OF_KIND = 3.0  # weight of the kind's rate against a request's own observations


@dataclass(slots=True)
class Rate:
    """The share of drafts that were accepted; newer ones count more."""

    fade: float
    accepted: float = 0.0
    tried: float = 0.0
    share: float = PRIOR

    def add(self, is_accepted: bool) -> None:
        self.accepted = self.accepted * self.fade + is_accepted
        self.tried = self.tried * self.fade + 1.0
        self.share = self.accepted / self.tried


@dataclass(slots=True)
class DraftRecord:
    """The latest proposal for a request, and how its drafts fared. kinds: one for each draft."""

    drafts: list[TokenId] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    rate: Rate = field(default_factory=lambda: Rate(FADE_OF_REQUEST))


class Acceptance:
    """Acceptance estimates for an engine's drafts. A kind is a number for how sure a proposer is of a draft.

    A draft is right when it equals the token that was sampled at its position, whether or not a step computed it. So
    requests whose drafts do not pay are observed, too, at no cost.
    """

    def __init__(self, num_kinds: int) -> None:
        self._kinds = [Rate(FADE_OF_KIND, PRIOR, 1.0) for _ in range(num_kinds)]
        self._all = Rate(FADE_OF_KIND, PRIOR, 1.0)

    def learn(self, record: DraftRecord, sampled: Sequence[TokenId]) -> None:
        """Compare the latest proposal for a request with the tokens that were sampled."""
        for draft, kind, token_id in zip(record.drafts, record.kinds, sampled, strict=False):
            is_accepted = draft == token_id
            record.rate.add(is_accepted)
            self._kinds[kind].add(is_accepted)
            self._all.add(is_accepted)
            if not is_accepted:
                break

    def of_kind(self, record: DraftRecord, kind: int) -> float:
        """Estimate the acceptance of the request's next draft, of this kind."""
        return self._estimate(self._kinds[kind], record.rate)

    def of_any(self, record: DraftRecord) -> float:
        """Estimate the acceptance of the request's next draft, whose kind is not known yet."""
        return self._estimate(self._all, record.rate)

    @staticmethod
    def _estimate(known: Rate, own: Rate) -> float:
        return (WEIGHT_OF_KIND * known.share + own.accepted) / (WEIGHT_OF_KIND + own.tried)

    def propose(self, record: DraftRecord, token_ids: list[TokenId], kinds: list[int]) -> Drafts:
        """Record these drafts and return them with their estimates."""
        record.drafts, record.kinds = token_ids, kinds
        rates, own, total = self._kinds, record.rate.accepted, WEIGHT_OF_KIND + record.rate.tried
        # As `of_kind`, inlined because all rows need it in every step: it takes a third of the time.
        return Drafts(token_ids, [(WEIGHT_OF_KIND * rates[kind].share + own) / total for kind in kinds])

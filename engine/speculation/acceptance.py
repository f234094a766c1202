"""How likely drafts are accepted, learned from those that were proposed, computed in a step or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Drafts, TokenId

PRIOR = 0.5  # of a kind of which nothing is known
FADE_OF_KIND = 0.99  # what an observation counts for after the next one of its kind
FADE_OF_REQUEST = 0.9
WEIGHT_OF_KIND = 3.0  # against the observations of a request


@dataclass(slots=True)
class Rate:
    """Share of drafts that were accepted, where newer ones count more."""

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
    """What was proposed last for a request, and how its drafts fared. kinds: of the drafts, one each."""

    drafts: list[TokenId] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    rate: Rate = field(default_factory=lambda: Rate(FADE_OF_REQUEST))


class Acceptance:
    """Estimates for an engine's drafts. A kind is how good a proposer thinks that a draft is: a number of its own.

    A draft is right when it equals the token that was sampled at its position, whether or not a step computed it: so
    a request whose drafts do not pay is watched at no cost.
    """

    def __init__(self, num_kinds: int) -> None:
        self._kinds = [Rate(FADE_OF_KIND, PRIOR, 1.0) for _ in range(num_kinds)]
        self._all = Rate(FADE_OF_KIND, PRIOR, 1.0)

    def learn(self, record: DraftRecord, sampled: Sequence[TokenId]) -> None:
        """Compare what was proposed for a request with what was sampled then."""
        for draft, kind, token_id in zip(record.drafts, record.kinds, sampled, strict=False):
            is_accepted = draft == token_id
            record.rate.add(is_accepted)
            self._kinds[kind].add(is_accepted)
            self._all.add(is_accepted)
            if not is_accepted:
                break

    def of_kind(self, record: DraftRecord, kind: int) -> float:
        """Estimate for the request's next draft of that kind."""
        return self._estimate(self._kinds[kind], record.rate)

    def of_any(self, record: DraftRecord) -> float:
        """Estimate for the request's next draft, of a kind that is not known yet."""
        return self._estimate(self._all, record.rate)

    @staticmethod
    def _estimate(known: Rate, own: Rate) -> float:
        return (WEIGHT_OF_KIND * known.share + own.accepted) / (WEIGHT_OF_KIND + own.tried)

    def propose(self, record: DraftRecord, token_ids: list[TokenId], kinds: list[int]) -> Drafts:
        """Note these drafts in the record. Returns them with estimates."""
        record.drafts, record.kinds = token_ids, kinds
        rates, own, total = self._kinds, record.rate.accepted, WEIGHT_OF_KIND + record.rate.tried
        # As of_kind, in a third of its time: of all rows in every step.
        return Drafts(token_ids, [(WEIGHT_OF_KIND * rates[kind].share + own) / total for kind in kinds])

"""What a worker has been given and has not reported as done, as the router counts it: prompts and rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.step_times import num_pairs


@dataclass(slots=True, eq=False)
class Work:
    """What a leg gives its worker to do."""

    num_prompt_tokens: int
    pending_tokens: int  # prompt tokens that count as queued on the worker until the leg's first delta
    decodes: bool  # a row of the worker's steps, soon if not now

    @property
    def pairs(self) -> float:
        return num_pairs(self.num_prompt_tokens - self.pending_tokens, self.pending_tokens)


@dataclass(slots=True)
class Backlog:
    """Counts of one worker; a pair is a prompt token with one token before it (`common/step_times.py`)."""

    num_rows: int = 0  # legs that decode here
    context_tokens: int = 0  # of their prompts
    num_expected: int = 0  # choices that will come here when their leg elsewhere ends
    expected_tokens: int = 0  # of their prompts
    _tokens: int = 0  # to compute, of legs without a first token
    _pairs: float = 0.0
    _done_tokens: int = 0  # of these, by the worker's reports
    _done_pairs: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return max(self._tokens - self._done_tokens, 0)

    @property
    def prompt_pairs(self) -> float:
        return max(self._pairs - self._done_pairs, 0.0)

    def add(self, work: Work) -> None:
        if work.decodes:
            self.num_rows += 1
            self.context_tokens += work.num_prompt_tokens
        self._tokens += work.pending_tokens
        self._pairs += work.pairs

    def expect(self, work: Work) -> None:
        """Count a leg elsewhere whose choice goes on here."""
        self.num_expected += 1
        self.expected_tokens += work.num_prompt_tokens

    def computed(self, num_tokens: int, pairs: float) -> None:
        """Count what a step has computed of prompts."""
        if self._tokens:
            self._done_tokens += num_tokens
            self._done_pairs += pairs

    def settle(self, work: Work) -> None:
        """Forget a leg's prompt: it is computed, or nobody wants it any more."""
        if not work.pending_tokens:
            return
        pairs = work.pairs
        self._tokens -= work.pending_tokens
        self._pairs -= pairs
        self._done_tokens = max(self._done_tokens - work.pending_tokens, 0) if self._tokens else 0
        self._done_pairs = max(self._done_pairs - pairs, 0.0) if self._tokens else 0.0
        work.pending_tokens = 0

    def remove(self, work: Work) -> None:
        if work.decodes:
            self.num_rows -= 1
            self.context_tokens -= work.num_prompt_tokens
        self.settle(work)

    def unexpect(self, work: Work) -> None:
        self.num_expected -= 1
        self.expected_tokens -= work.num_prompt_tokens

"""Decides whether the engine plans steps while the previous ones run, or waits for their tokens and drafts.

Waiting leaves the GPU idle between steps, so it pays only if drafts gain more. Both kinds of steps are measured from
time to time; how many drafts would be accepted is known without computing any (`acceptance.py`). Pure: no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.step_times import StepTimes
from engine.plan import StepSize
from engine.speculation.draft_length import DraftLengths

PATIENCE = 8  # consecutive steps for which the other way would be better
NUM_SKIPPED = 3  # steps after a change, some of which ran the old way
FIRST_TRIAL, TRIAL = 16, 8  # steps before the first trial of the other way, and steps of a trial
STEPS_BETWEEN_TRIALS = 400
MEASURED_STEPS = 16  # steps with drafts before they are judged
FADE, LONGEST_PAUSE = 0.98, 3200  # see MeasuredOverlap
TRIALS_SHARE = 0.01  # most time that trials of drafts that do not pay may take
GAIN = 1.02  # required gain of drafts over overlapped steps, so that noise does not change the way


class Overlap:
    """waits: whether steps wait for the previous one, as at first."""

    def __init__(self, lengths: DraftLengths) -> None:
        self.waits = True
        self._lengths = lengths
        self._overlapped = StepTimes()
        self._num_steps = 0  # since the last change
        self._num_better = 0  # consecutive steps for which the other way would be better
        self._trial_after = FIRST_TRIAL
        self._is_trial = False

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from the duration of a step. Steps right after a change are skipped, as they are of both kinds."""
        if self._num_steps <= NUM_SKIPPED:
            return
        if self.waits:
            self._lengths.observe(size, seconds)
        elif size.num_decode_tokens and not size.num_prompt_tokens:
            self._overlapped.observe(size.num_decode_tokens, 0, seconds, size.context)

    def count(self, num_accepted: int) -> None:
        """Learn how many drafts of a row were accepted in the step observed last."""

    def decide(self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int) -> None:
        """Decide after a step of `num_rows` decode rows; arguments as for `expected_to_pay`."""
        self._num_steps += 1
        if self._is_trial:
            if self._num_steps >= TRIAL + NUM_SKIPPED:
                self._change(is_trial=False)
            return
        cost = self._overlapped.cost
        overlapped = num_rows / seconds if (seconds := cost.seconds(num_rows, context=context)) else 0.0
        drafting = self._lengths.best_speed(acceptance, num_rows, max_drafts, context)
        is_known = overlapped and drafting
        if not is_known or self.waits == (drafting > overlapped * GAIN):
            self._num_better = 0
        else:
            self._num_better += 1
        if self._num_better >= PATIENCE:
            self._change(is_trial=False)
        elif self._num_steps >= self._trial_after and (self.waits or acceptance):
            self._trial_after = STEPS_BETWEEN_TRIALS
            self._change(is_trial=True)

    def _change(self, is_trial: bool) -> None:
        self.waits, self._is_trial = not self.waits, is_trial
        self._num_steps = self._num_better = 0


class MeasuredOverlap(Overlap):
    """For drafts that take GPU time, whose costs are known only from steps that wait.

    So it compares tokens per second of steps that wait, drafting included, with overlapped steps of as many rows.
    """

    def __init__(self, lengths: DraftLengths) -> None:
        super().__init__(lengths)
        self.waits = False
        self._num_rows = 0
        self._pause = 0  # steps; 0: before the first trial
        self._tokens = self._seconds = (
            0.0  # of steps that wait; tokens as the seconds that overlapped steps take for them
        )
        self._plain_seconds = 0.0  # per row, of an overlapped step like the one observed last
        self._lost = 0.0  # seconds of all steps since the change, minus those of overlapped steps
        self._known: set[int] = set()  # numbers of rows, by powers of two, with measured overlapped steps

    def observe(self, size: StepSize, seconds: float) -> None:
        """See Overlap."""
        super().observe(size, seconds)
        if not self.waits and self._num_steps > NUM_SKIPPED and not size.num_prompt_tokens:
            self._known.add(size.num_decode_tokens.bit_length())
        if not self.waits or size.num_prompt_tokens or not self._num_rows:
            return
        self._plain_seconds = self._overlapped.cost.seconds(self._num_rows, context=size.context) / self._num_rows
        self._lost += seconds - self._plain_seconds * self._num_rows  # with prompts that the draft model computes
        if self._num_steps <= NUM_SKIPPED:
            return
        self._seconds = FADE * self._seconds + seconds
        self._tokens = FADE * self._tokens + self._plain_seconds * self._num_rows

    def count(self, num_accepted: int) -> None:
        """See Overlap."""
        self._tokens += self._plain_seconds * num_accepted

    def decide(self, acceptance: Sequence[Sequence[float]], num_rows: int, max_drafts: int, context: int) -> None:
        """See Overlap; only `num_rows` is used."""
        self._num_steps += 1
        self._num_rows = num_rows
        if not self.waits:
            if self._num_steps >= (self._pause or FIRST_TRIAL):
                self._change(is_trial=True)
        elif self._num_steps >= MEASURED_STEPS + NUM_SKIPPED:
            if self._tokens < self._seconds * GAIN:
                is_known = num_rows.bit_length() in self._known
                # Otherwise measure overlapped steps of as many rows first.
                self._pause = self._longer_pause() if is_known else TRIAL + NUM_SKIPPED
                self._change(is_trial=False)
            elif (
                self._num_steps >= 4 * STEPS_BETWEEN_TRIALS
            ):  # the time of overlapped steps changes with contexts and rows
                self._pause = TRIAL + NUM_SKIPPED
                self._change(is_trial=False)

    def _longer_pause(self) -> int:
        """Return the number of steps until the next trial, after one that did not pay."""
        step_seconds = self._plain_seconds * self._num_rows
        affordable = self._lost / (TRIALS_SHARE * step_seconds) if step_seconds else 0.0
        return int(min(max(4 * self._pause, STEPS_BETWEEN_TRIALS, affordable), LONGEST_PAUSE))

    def _change(self, is_trial: bool) -> None:
        super()._change(is_trial)
        self._tokens = self._seconds = self._plain_seconds = self._lost = 0.0

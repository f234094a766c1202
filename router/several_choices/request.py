"""Requests with several choices for each prompt.

The first choice of a prompt starts alone; the others start when the prompt is computed, so that they find it in the
prefix cache.
"""

from __future__ import annotations

import asyncio

from protos import types_pb2 as pb
from router.api.sampling import SEED_MASK
from router.api.text import Update
from router.choice import Choice, State
from router.metrics import RouterMetrics
from router.request import GenerationRequest


def samplings(params: pb.SamplingParams, per_prompt: int) -> list[pb.SamplingParams]:
    """Return the parameters of a prompt's choices, of which `params` are the first's."""
    return [for_choice(params, number) for number in range(per_prompt)]


def for_choice(params: pb.SamplingParams, index: int) -> pb.SamplingParams:
    """Derive the parameters of choice `index` of n: another seed, and no prompt logprobs, which the first one has."""
    if index == 0:
        return params
    derived = pb.SamplingParams()
    derived.CopyFrom(params)
    derived.seed = (params.seed + index) & SEED_MASK
    derived.ClearField("prompt_logprobs")
    return derived


class SeveralChoices(GenerationRequest):
    """A request whose prompts have `per_prompt` choices each. `choices` are in the order of their prompts."""

    def __init__(self, request_id: str, choices: list[Choice], metrics: RouterMetrics, per_prompt: int) -> None:
        super().__init__(request_id, choices, metrics)
        self._per_prompt = per_prompt
        self._held = set(range(len(self.leaders)))  # prompts whose other choices wait for the first one

    @property
    def leaders(self) -> list[Choice]:
        return self.choices[:: self._per_prompt]

    def on_update(self, choice: Choice, update: Update) -> None:
        if self._held and (prompt := choice.index // self._per_prompt) in self._held:  # the prompt is computed now
            self._held.remove(prompt)
            # Not at once: first the index must have the KV events of this report.
            asyncio.get_running_loop().call_soon(self._start_followers, prompt * self._per_prompt)
        super().on_update(choice, update)

    def _start_followers(self, leader: int) -> None:
        for choice in self.choices[leader + 1 : leader + self._per_prompt]:
            if choice.state is State.NEW:  # else the failure of another one has cancelled it
                choice.start(self)

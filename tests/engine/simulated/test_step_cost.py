"""What a step with prompts takes where these hide the reading of weights."""

from __future__ import annotations

import pytest

from engine.simulated.step_cost import SimulatedCost


def test_prompt_tokens_hide_the_reading_of_weights() -> None:
    cost = SimulatedCost.parse("base=0.004,row=1e-5,prompt=0.0005,prompt_token=2e-5,weights=0.003")
    assert cost.seconds(0) == 0.0
    assert cost.seconds(10) == pytest.approx(0.0041)  # they are of its base
    assert [cost.seconds(0, tokens) for tokens in (50, 100)] == pytest.approx([0.0045, 0.0045])  # read for few, too
    assert cost.seconds(0, 1000) == pytest.approx(0.001 + 0.0205)
    assert cost.seconds(10, 100) == pytest.approx(0.0041 + 0.0005)
    assert cost.seconds(10, 1000) == pytest.approx(0.0041 + 0.0205 + 0.0002 - 0.003)  # its rows are computed, too

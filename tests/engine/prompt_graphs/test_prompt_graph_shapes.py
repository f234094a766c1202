from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.prompt_graphs.shapes import prompt_graph_trial

CONFIG = EngineConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=100)


@pytest.mark.parametrize(("max_model_len", "most"), [(1000, 100), (50, 49)])
def test_the_trial_fills_the_largest_graph(max_model_len: int, most: int) -> None:
    sizes = [row.num_tokens for row in prompt_graph_trial(CONFIG, max_model_len, num_blocks=64).rows]
    assert sizes == [1] * (CONFIG.max_num_seqs - 1) + [min(most, 100 - CONFIG.max_num_seqs + 1)]

"""The steps with prompts that graphs are captured for."""

from __future__ import annotations

from itertools import pairwise

from engine.config import EngineConfig
from engine.gpu.steps.rows import MAX_GRAPH_TOKENS
from engine.plan import StepPlan
from engine.request import SamplingParams
from engine.trial_plans import trial_plan

# Token counts of graphs with up to FEW_ROWS rows, and with up to MANY_ROWS.
PROMPT_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, MAX_GRAPH_TOKENS)
MANY_ROWS_BUCKETS = (128, 256, 384, 512, 640, 768, 896, MAX_GRAPH_TOKENS)
FEW_ROWS, MANY_ROWS = 16, 256


def prompt_shapes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return (num_tokens, num_rows) of all graphs, in the order in which a step tries them."""
    rows = min(FEW_ROWS, max_rows), min(MANY_ROWS, max_rows)
    found = {
        (bucket, num_rows)
        for buckets, num_rows in zip((PROMPT_BUCKETS, MANY_ROWS_BUCKETS), rows, strict=True)
        for below, bucket in pairwise((0, *buckets))
        if below < max_tokens
    }
    return sorted(found)


def prompt_graph_trial(config: EngineConfig, max_model_len: int, num_blocks: int, num_groups: int = 1) -> StepPlan:
    """Return the largest step with a prompt that a graph is captured for. num_blocks: shared by the sequences."""
    num_tokens, num_rows = prompt_shapes(config.max_num_seqs, config.max_num_batched_tokens)[-1]
    num_tokens = min(num_tokens, config.max_num_batched_tokens)
    shares = [(0, 1)] * (num_rows - 1) + [(0, min(num_tokens - num_rows + 1, max_model_len - 1))]
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, top_p=0.9)
    return trial_plan(shares, config.block_size, params, num_blocks, num_groups)

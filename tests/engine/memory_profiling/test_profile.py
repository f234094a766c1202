"""The memory that KV blocks get, from measured numbers, and the steps that are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.memory_profiling.profile import (
    DRIVER_BYTES,
    TRIAL_BLOCKS,
    MemoryUse,
    decode_trial,
    kv_bytes,
    prefill_trials,
)

GB = 1_000_000_000
ALONE = MemoryUse(total_bytes=100 * GB, free_bytes=83 * GB, process_bytes=16 * GB, peak_bytes=20 * GB, graph_bytes=GB)
CONFIG = EngineConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=100)


def test_alone_a_worker_gets_its_share_of_the_whole_gpu() -> None:
    assert kv_bytes(ALONE, 0.9, 1000) == 90 * GB - 20 * GB - GB - DRIVER_BYTES
    assert kv_bytes(ALONE, 0.5, 1000) == 50 * GB - 20 * GB - GB - DRIVER_BYTES


def test_a_neighbour_within_its_own_share_takes_nothing_away() -> None:
    beside = replace(ALONE, free_bytes=ALONE.free_bytes - 45 * GB)
    assert kv_bytes(beside, 0.45, 1000) == kv_bytes(ALONE, 0.45, 1000)


def test_no_more_than_what_is_free_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    beside = replace(ALONE, free_bytes=30 * GB)
    assert kv_bytes(beside, 0.9, 1000) == 30 * GB - 4 * GB - GB
    assert "other processes hold GPU memory" in caplog.text


@pytest.mark.parametrize(
    ("use", "fraction"),
    [(ALONE, 0.21), (replace(ALONE, free_bytes=4 * GB), 0.9), (replace(ALONE, peak_bytes=95 * GB), 0.9)],
)  # fmt: skip
def test_without_room_the_message_has_the_numbers(use: MemoryUse, fraction: float) -> None:
    with pytest.raises(ConfigError, match=rf"of 100.0 GB, --gpu-memory-fraction {fraction} .* GB are free"):
        kv_bytes(use, fraction, 1000)


def test_trials_fill_every_bound_of_a_step() -> None:
    many, longest = prefill_trials(CONFIG, max_model_len=1000)
    assert [row.num_tokens for row in many.rows] == [12] * 8
    (row,) = longest.rows
    assert (row.start, row.num_tokens) == (899, 100)
    for plan in (many, longest, decode_trial(CONFIG)):
        for new, row in zip(plan.new, plan.rows, strict=True):
            assert row.samples
            assert len(new.token_ids) == row.stop < 1000
            assert len(row.new_block_ids) == -(-row.stop // 16)
            assert max(row.new_block_ids) < TRIAL_BLOCKS
    assert [row.num_tokens for row in decode_trial(CONFIG).rows] == [1] * 8


def test_trials_of_short_models_stay_inside_the_model() -> None:
    for plan in prefill_trials(replace(CONFIG, max_num_seqs=1), max_model_len=50):
        (row,) = plan.rows
        assert (row.start, row.num_tokens) == (0, 49)

import itertools
import json
import random

import pytest

from cli.load.workload import PromptMaker, TraceRow, parse_range, random_workload, read_trace, trace_workload
from common.errors import ConfigError


def num_words(prompt):
    return len(prompt.split())


def shared_words(left: str, right: str) -> int:
    pairs = zip(left.split(), right.split(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_ranges():
    assert parse_range("128", "--input-len") == (128, 128)
    assert parse_range("100-1024", "--input-len") == (100, 1024)
    for bad in ("", "0", "9-3", "x", "1-"):
        with pytest.raises(ConfigError):
            parse_range(bad, "--input-len")


def test_random_workload_is_seeded_and_within_its_ranges():
    def make(seed):
        return random_workload(PromptMaker(), 50, (5, 9), (3, 4), 10.0, seed)

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert {num_words(request.prompt) for request in make(1)} <= set(range(5, 10))
    assert {request.num_output_tokens for request in make(1)} == {3, 4}


def test_poisson_arrivals_have_the_rate_that_was_asked_for():
    requests = random_workload(PromptMaker(), 4000, (1, 1), (1, 1), 20.0, 0)
    gaps = [b.at_seconds - a.at_seconds for a, b in itertools.pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # exponential gaps: deviation equals mean


def test_without_a_rate_all_are_due_at_once():
    assert {r.at_seconds for r in random_workload(PromptMaker(), 5, (1, 1), (1, 1), 0.0, 0)} == {0.0}


def test_token_id_prompts_stay_in_the_vocabulary():
    prompt = PromptMaker(64).fresh(random.Random(0), 500)
    assert isinstance(prompt, list)
    assert min(prompt) >= 3
    assert max(prompt) < 64
    with pytest.raises(ConfigError):
        PromptMaker(2)


ROWS = [TraceRow(0.0, 1200, 10, (0, 1, 2)), TraceRow(1.0, 1300, 20, (0, 1, 9)), TraceRow(2.0, 600, 30, (5, 6))]


def test_trace_prompts_share_exactly_the_blocks_that_the_trace_shares():
    first, second, third = trace_workload(PromptMaker(), ROWS, 1.0, 1.0, seed=0)
    assert [num_words(request.prompt) for request in (first, second, third)] == [1200, 1300, 600]
    assert 1024 <= shared_words(str(first.prompt), str(second.prompt)) <= 1030  # two blocks, and a chance hit or so
    assert shared_words(str(first.prompt), str(third.prompt)) < 8


def test_trace_scales_time_and_lengths_and_keeps_sharing():
    first, second, _ = trace_workload(PromptMaker(512), ROWS, 2.0, 0.25, seed=0)
    assert second.at_seconds == 0.5
    assert len(second.prompt) == 325
    assert second.num_output_tokens == 5
    assert first.prompt[:256] == second.prompt[:256]
    assert first.prompt[256:290] != second.prompt[256:290]


def test_rows_without_block_ids_get_noise_of_their_own():
    left, right = trace_workload(PromptMaker(512), [TraceRow(0, 40, 1), TraceRow(0, 40, 1)], 1.0, 1.0, 0)
    assert len(left.prompt) == len(right.prompt) == 40
    assert left.prompt != right.prompt


def test_mooncake_file(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 1500 * n, "input_length": 700, "output_length": 3, "hash_ids": [0, n]} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_trace(path)[1] == TraceRow(1.5, 700, 3, (0, 1))
    assert len(read_trace(path, max_requests=2)) == 2
    assert len(read_trace(path, duration_seconds=2.0)) == 2


def test_rows_of_one_tick_are_spread_until_the_next(tmp_path):
    path = tmp_path / "t.jsonl"
    row = {"input_length": 700, "output_length": 3, "hash_ids": [0]}
    path.write_text("".join(json.dumps(row | {"timestamp": at}) + "\n" for at in (0, 0, 0, 3000, 6000, 6000)))
    assert [row.at_seconds for row in read_trace(path)] == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]


def test_azure_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8"
    )
    assert read_trace(path) == [TraceRow(0.0, 4808, 10), TraceRow(0.052, 3180, 8)]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", "{}\n"), ("a.jsonl", "not json\n"), ("a.csv", "a,b\n1,2\n"), ("a.csv", ""), ("a.jsonl", "[1]\n")],
)
def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="--trace"):
        read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "missing.csv")

"""The journal that a worker gets to continue a choice."""

from __future__ import annotations

from common.token_ids import unpack_ids
from protos import types_pb2 as pb
from router.journal import Journal


def test_journal_replays_tokens_under_a_new_name_and_prompt_logprobs_once() -> None:
    sampling = pb.SamplingParams(max_tokens=9, seed=3, prompt_logprobs=1)
    journal = Journal("r-0", [1, 2], sampling, deadline=10.0, arrival=0.0)
    first = journal.next_submit(1.0)
    assert first.sampling.HasField("prompt_logprobs")
    assert first.deadline_seconds == 9.0
    journal.output_token_ids += [7, 8]
    second = journal.next_submit(4.0)
    assert (unpack_ids(second.prompt_token_ids), list(second.output_token_ids)) == ([1, 2], [7, 8])
    assert first.request_id != second.request_id
    assert not second.sampling.HasField("prompt_logprobs")
    assert (second.sampling.max_tokens, second.sampling.seed) == (9, 3)
    assert journal.next_submit(11.0).deadline_seconds > 0  # 0 would mean none

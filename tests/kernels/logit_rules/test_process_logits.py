from __future__ import annotations

import pytest
import torch

from engine.gpu.steps.rows import RowChanges
from engine.logit_rules.logits import apply_params
from engine.logit_rules.logits_columns import LogitsColumns
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from kernels.gpu.logit_rules.process_logits import CHUNK, IN_PROMPT, MAX_COUNT, LogitsRules, process_logits

VOCAB = CHUNK + 905  # neither a whole chunk nor a whole word of bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7, presence_penalty=-1.0),
        SamplingParams(frequency_penalty=0.3, presence_penalty=1.1),
        SamplingParams(logit_bias=((0, 2.5), (VOCAB - 1, -4.0), (CHUNK, 100.0), (0, -1.0))),
        SamplingParams(allowed_token_ids=(1, 31, 32, CHUNK - 1, CHUNK, VOCAB - 1), presence_penalty=1.0),
    ],
)
def test_equals_the_reference(params: SamplingParams, dtype: torch.dtype, device: torch.device) -> None:
    columns = LogitsColumns(3, VOCAB, device)
    output = [7, VOCAB - 1, 7, CHUNK, 7, 0]
    request = RequestState(RequestId("a"), [1, 7, CHUNK - 1, *output], 3, params)
    columns.apply(RowChanges(fresh=[(2, request)]))
    logits = (torch.randn(4, VOCAB, device=device) * 3).to(dtype)
    found = columns.changed(logits, [3], [2], [request], [9])[0]
    want = logits[3].float()
    apply_params(want, request, 9)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_rows_without_rules_are_copied(device: torch.device) -> None:
    rules = LogitsRules.empty(2, 100, 4, device)
    rules.blocked.fill_(-1)
    logits = torch.randn(3, 100, device=device)
    out = torch.empty(3, 100, device=device)
    process_logits(logits, torch.tensor([2, 0], device=device), torch.tensor([-1, 1], device=device), rules, out)
    assert torch.equal(out[0], logits[2])
    assert torch.isneginf(out[1]).all()


def test_counts_end_before_the_mark_of_prompt_tokens(device: torch.device) -> None:
    columns = LogitsColumns(1, 50, device)
    params = SamplingParams(frequency_penalty=0.001)
    request = RequestState(RequestId("a"), [3] + [3] * (MAX_COUNT - 1), 1, params)
    columns.apply(RowChanges(fresh=[(0, request)]))
    row, token = torch.tensor([0], device=device), torch.tensor([3], device=device)
    for _ in range(3):
        columns.count(row, token)
    assert int(columns._rules.counts[0, 3]) == IN_PROMPT + MAX_COUNT


def test_outputs_must_fit(device: torch.device) -> None:
    rules = LogitsRules.empty(1, 100, 4, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        process_logits(torch.zeros(1, 100, device=device), index, index, rules, torch.zeros(1, 99, device=device))

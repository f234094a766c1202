"""Measurements of workers while choices are served, pushed by hand."""

from __future__ import annotations

from protos import types_pb2 as pb
from router.costs.meter import meter_of
from tests.router.pushed import Router


async def test_a_prompt_is_queued_where_it_is_computed_until_its_first_token() -> None:
    router = Router(prefill=1)
    (prefill,), (decode,) = router.prefill, router.decode
    router.request()
    computing, decoding = meter_of(prefill.link), meter_of(decode.link)
    assert computing.view().queued_prefill_tokens == 3
    assert decoding.view().num_waiting == decoding.view().num_rows == 1  # it will come there
    assert decoding.view().context_tokens == 3
    prefill.prefilled("H")
    assert computing.view().queued_prefill_tokens == 0
    assert (decoding.view().num_waiting, decoding.view().num_rows) == (0, 1)
    decode.says("i", finish_reason=pb.FINISH_REASON_LENGTH)
    assert decoding.view().num_rows == decoding.view().context_tokens == 0
    assert router.is_quiet()


async def test_an_answer_tells_how_long_a_token_takes() -> None:
    router = Router()
    router.request()
    router.decode[0].says("abc")
    router.decode[0].says("de", finish_reason=pb.FINISH_REASON_LENGTH)
    assert 0 < meter_of(router.decode[0].link).rates.token_seconds < 100

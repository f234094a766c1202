"""The router's state of one worker: its failures, and properties that do not fit."""

from __future__ import annotations

import pytest

from common.errors import HandshakeError
from kvstore.pool.block_hash import HASH_VERSION
from protos import types_pb2 as pb
from router.workers.failures import OPEN_SECONDS, Breaker
from router.workers.model_workers import check_worker


def test_breaker_opens_after_three_failures_close_together() -> None:
    breaker = Breaker()
    for time in (0.0, 10.0, 20.0, 21.0):
        breaker.record_failure(time)
        assert not breaker.is_open(time)
    breaker.record_failure(22.0)
    assert breaker.is_open(22.0)
    assert not breaker.is_open(22.0 + OPEN_SECONDS)
    breaker.record_failure(30.0)
    breaker.record_failure(30.1)
    breaker.record_success()
    breaker.record_failure(30.2)
    assert not breaker.is_open(30.2)


def worker(**fields: object) -> pb.WorkerInfo:
    facts = {
        "worker_id": "w", "role": "decode", "tokenizer_hash": "t", "hash_version": HASH_VERSION, "block_size": 16,
        "vocab_size": 10, "max_model_len": 100, "model_fingerprint": "f", "kv_dtype": "float32", "kv_layout": "one",
    }  # fmt: skip
    return pb.WorkerInfo(**{**facts, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "prefill"}, "listed under --decode"),
        ({"tokenizer_hash": "x"}, "another tokenizer"),
        ({"hash_version": HASH_VERSION + 1}, "block keys by version"),
        ({"block_size": 0}, "impossible sizes"),
        ({"block_size": 32}, "block_size differs: w has '32', other has '16': .*--block-size"),
        ({"model_fingerprint": "g"}, "model_fingerprint differs"),
        ({"kv_dtype": "float16"}, "kv_dtype differs: .*--kv-cache-dtype"),
        ({"kv_layout": "other"}, "kv_layout differs: .*--model"),
    ],
)
def test_handshake_says_what_differs(change: dict[str, object], message: str) -> None:
    check_worker(worker(), "decode", "t", [worker(worker_id="other")])
    with pytest.raises(HandshakeError, match=message):
        check_worker(worker(**change), "decode", "t", [worker(worker_id="other")])

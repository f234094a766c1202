"""Handshake: whether the workers of one model are compatible. A pure comparison of what they announce."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import HandshakeError
from kvstore.pool.block_hash import HASH_VERSION
from protos import types_pb2 as pb

MAX_SHOWN = 64  # characters of a value that differs
SAME = "start this model's workers with the same "
# Field of WorkerInfo -> what to do when it differs between workers.
_MUST_AGREE = {
    "model_fingerprint": SAME + "--model, --dtype, --quant-mode and --kv-cache-dtype",
    "tokenizer_hash": "give both the same model",
    "block_size": SAME + "--block-size",
    "hash_version": "run the same version of mini-infer everywhere",
    "kv_layout": SAME + "--model, --dtype and --kv-cache-dtype",
    "kv_dtype": SAME + "--dtype and --kv-cache-dtype",
}


def check_worker(info: pb.WorkerInfo, role: str, tokenizer_hash: str, others: Iterable[pb.WorkerInfo]) -> None:
    """Raise HandshakeError, saying what differs and how to fix it, when `info` cannot join."""
    if info.role != role:
        raise HandshakeError(f"{info.worker_id} is a {info.role} worker, but is listed under --{role}")
    if info.tokenizer_hash and info.tokenizer_hash != tokenizer_hash:
        raise HandshakeError(
            f"{info.worker_id} has another tokenizer than this router "
            f"({info.tokenizer_hash[:12]} and {tokenizer_hash[:12]}): {_MUST_AGREE['tokenizer_hash']}"
        )
    if info.hash_version != HASH_VERSION:
        raise HandshakeError(
            f"{info.worker_id} computes block keys by version {info.hash_version}, this router by version "
            f"{HASH_VERSION}: {_MUST_AGREE['hash_version']}"
        )
    if info.max_model_len < 2 or info.vocab_size < 1 or info.block_size < 1:
        raise HandshakeError(f"{info.worker_id} describes itself with impossible sizes: restart or update it")
    for other in others:
        for name, remedy in _MUST_AGREE.items():
            mine, theirs = getattr(info, name), getattr(other, name)
            if mine != theirs:
                raise HandshakeError(
                    f"{name} differs: {info.worker_id} has {str(mine)[:MAX_SHOWN]!r}, {other.worker_id} has "
                    f"{str(theirs)[:MAX_SHOWN]!r}: {remedy}"
                )

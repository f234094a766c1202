"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file (`tokenizer.ggml.*`).

There are two kinds: `gpt2`, byte-level BPE with the pre-tokenizer that `tokenizer.ggml.pre` names, and `llama`,
SentencePiece BPE with byte fallback. Does not read files and knows nothing of chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from common.errors import UnsupportedModelError
from common.gguf.pre_tokenizers import Cutting, cutting_of

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def backend_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the metadata describes. Raises UnsupportedModelError for an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedModelError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece_bpe(metadata, tokens)
    else:
        raise UnsupportedModelError(f"GGUF tokenizer {kind!r} is not supported; gpt2 and llama are")
    _add_special_tokens(backend, metadata, tokens)
    return backend


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    cutting = _cutting(metadata)
    merges = [_split_merge(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=cutting.whole_pieces))
    backend.pre_tokenizer = cutting.pre_tokenizer()
    if cutting.is_composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _cutting(metadata: Mapping[str, Any]) -> Cutting:
    return cutting_of(str(metadata.get("tokenizer.ggml.pre", "default")))


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise UnsupportedModelError("the GGUF file has a malformed BPE merge")
    return left, right


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece merges the pair whose result scores best, which equals BPE with merges sorted by score."""
    scores = metadata.get("tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type")
    if not scores or len(scores) != len(tokens) or not types or len(types) != len(tokens):
        raise UnsupportedModelError("the GGUF file's SentencePiece tokenizer lacks scores or token types")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in zip(tokens, scores, types, strict=True):
        if kind != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = [(left, right) for *_, left, right in ranked]
    backend = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _add_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    control = [token for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    # Files do not say which special tokens take the white space after them. Phi-3's do, but not those of Phi-4, whose
    # files name the same architecture.
    is_phi3 = (metadata.get("general.architecture"), metadata.get("tokenizer.ggml.model")) == ("phi3", "llama")
    strips = set(control) - {"<unk>", "<s>", "<|endoftext|>"} if is_phi3 else set()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=token in strips) for token in control]
    )
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    by_default = metadata.get("tokenizer.ggml.model") == "llama" or _cutting(metadata).adds_bos
    wrapped = ["$A"]
    if bos := _named_token(metadata, tokens, "bos", by_default):
        wrapped = [bos, *wrapped]
    if eos := _named_token(metadata, tokens, "eos", False):  # of models for embeddings
        wrapped = [*wrapped, eos]
    if len(wrapped) > 1:
        special_tokens = [(token, tokens.index(token)) for token in {*wrapped} - {"$A"}]
        backend.post_processor = processors.TemplateProcessing(wrapped, None, special_tokens)


def _named_token(metadata: Mapping[str, Any], tokens: list[str], name: str, by_default: bool) -> str:
    """Return the token with that name if the file puts it at an end of texts, else an empty text."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    is_added = metadata.get(f"tokenizer.ggml.add_{name}_token", by_default)
    return tokens[token_id] if is_added and isinstance(token_id, int) and token_id < len(tokens) else ""

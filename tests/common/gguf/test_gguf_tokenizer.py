"""Tokenizers from GGUF metadata, in small files written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from common.errors import UnsupportedModelError
from common.gguf.tokenizer import backend_from_metadata
from common.model_files import ModelFiles
from common.text.load import load_tokenizer
from common.text.tokenizer import byte_level_alphabet

LETTERS = sorted(byte_level_alphabet())


def byte_level(pre: str, **extra: Any) -> dict[str, Any]:
    tokens = [*LETTERS, "Ġa", "ab", "12", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["Ġ a", "a b", "1 2"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **extra,
    }


def sentencepiece() -> dict[str, Any]:
    special = ["<unk>", "<s>", "</s>"]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁hell", "▁hello", "hello"]
    tokens = [*special, *data, *pieces]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -14.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write(path: Path, metadata: dict[str, Any]) -> ModelFiles:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles("x", "gguf", path)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "x12", ["x", "1", "2"]),
        ("default", "x12", ["x", "12"]),
        ("llama-bpe", "x12", ["x", "12"]),
        ("qwen2", "x12", ["x", "1", "2"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed first
        ("smollm", "ab a", ["ab", "Ġa"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", byte_level(pre)))
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)] == expected


def test_bos_and_special_tokens(tmp_path: Path) -> None:
    metadata = byte_level("llama-bpe", **{"tokenizer.ggml.bos_token_id": 258, "tokenizer.ggml.add_bos_token": True})
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("ab", add_special_tokens=True) == [258, 257]
    assert tokenizer.encode("<|end|>", allow_special=True) == [259]
    assert 259 not in tokenizer.encode("<|end|>")
    assert tokenizer.eos_token_ids == (259,)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_may_end_with_the_eos_token(adds_bos: bool, tmp_path: Path) -> None:
    """Qwen3-Embedding's vectors are those of this token."""
    flags = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": adds_bos}
    metadata = byte_level("qwen2", **{"tokenizer.ggml.bos_token_id": 258, **flags})
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("ab", add_special_tokens=True) == [258] * adds_bos + [257, 259]
    assert tokenizer.encode("ab") == [257]


def test_a_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    """As converters write the named templates of tokenizer_config.json."""
    templates = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T{{ tools }}"}
    metadata = byte_level("default", **templates, **{"tokenizer.chat_templates": ["tool_use"]})
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    assert tokenizer.templates == {"default": "D", "tool_use": "T{{ tools }}"}
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "a"}])) == "D"


@pytest.mark.parametrize(
    ("pre", "flag", "is_added"),
    [("falcon3", None, True), ("tekken", None, True), ("llama-bpe", False, False), ("qwen2", None, False)],
)
def test_a_file_without_a_flag_begins_texts_as_its_pre_tokenizer_says(
    pre: str, flag: bool | None, is_added: bool, tmp_path: Path
) -> None:
    """llama.cpp's converter writes no flag for Llama-3."""
    flags = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = load_tokenizer(
        write(tmp_path / "m.gguf", byte_level(pre, **{"tokenizer.ggml.bos_token_id": 258, **flags}))
    )
    assert tokenizer.encode("ab", add_special_tokens=True) == [258] * is_added + [257]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<end_of_turn>", "<start_of_turn>"], ["<|end|>", "<end_of_turn>"]),  # Gemma's, whose files name <eos>
        (["<|user|>", "<|endoftext|>"], ["<|end|>", "<|endoftext|>"]),
        (["<|return|>", "<|call|>", "<|channel|>"], ["<|call|>", "<|return|>"]),  # <|end|> ends a message of gpt-oss
    ],
)
def test_tokens_that_end_an_answer_without_being_named(texts: list[str], ends: list[str], tmp_path: Path) -> None:
    metadata = byte_level("default")
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [3] * len(texts)
    eos = metadata["tokenizer.ggml.tokens"].index(ends[0])
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata | {"tokenizer.ggml.eos_token_id": eos}))
    assert sorted(map(tokenizer.token_text, tokenizer.eos_token_ids)) == sorted(ends)


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", sentencepiece()))
    token_ids = tokenizer.encode("hello helé", add_special_tokens=True)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    assert texts == ["<s>", "▁hello", "▁", "he", "l", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(token_ids) == "hello helé"
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push((token_id,)) for token_id in token_ids]
    assert pieces == ["", "hello", " ", "he", "l", "", "é"]


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_special_tokens_of_phi3_take_the_white_space_after_them(arch: str) -> None:
    metadata = sentencepiece() | {"general.architecture": arch}
    metadata["tokenizer.ggml.tokens"] += ["<|user|>", "<|endoftext|>", "\n"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 1]
    metadata["tokenizer.ggml.scores"] += [0.0, 0.0, -20.0]
    backend = backend_from_metadata(metadata)
    token_ids = backend.encode("<|user|>\nhello<|endoftext|>\n", add_special_tokens=False).ids
    tokens = [backend.id_to_token(token_id) for token_id in token_ids]
    line_break = ["▁", "\n"]
    hello = ["▁hello"] if arch == "phi3" else [*line_break, "hello"]
    assert tokens == ["<|user|>", *hello, "<|endoftext|>", *line_break]


def test_a_text_keeps_its_first_space_if_the_tokenizer_adds_none(tmp_path: Path) -> None:
    metadata = sentencepiece() | {"tokenizer.ggml.add_space_prefix": False}  # as Gemma's
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    for text in ("hello", " hello", "  hello"):
        token_ids = tokenizer.encode(text)
        assert tokenizer.decode(token_ids) == text == tokenizer._backend.decode(token_ids)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.pre": "unheard-of"},
        {"tokenizer.ggml.tokens": []},
        {"tokenizer.ggml.merges": ["ab"]},
        {"tokenizer.ggml.model": "llama"},  # without scores
    ],
)
def test_unknown_kinds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        backend_from_metadata({**byte_level("smollm"), **change})

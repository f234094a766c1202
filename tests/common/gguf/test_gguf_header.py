"""The header of GGUF files: no damage to it makes the reader crash or allocate without bound."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UnsupportedModelError
from common.gguf.header import read_gguf_header
from common.model_files import resolve_model


def test_the_default_model() -> None:
    path = resolve_model("").path
    header = read_gguf_header(path)
    metadata = header.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.rope.freq_base"] == 100000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(metadata["tokenizer.ggml.merges"]) == 48900
    assert set(metadata["tokenizer.ggml.token_type"]) <= set(range(1, 7))
    embedding = header.tensors["token_embd.weight"]
    assert embedding.shape == (49152, 576)
    assert all(tensor.offset % 32 == 0 for tensor in header.tensors.values())
    assert max(tensor.offset for tensor in header.tensors.values()) < path.stat().st_size


def test_impossible_lengths_are_refused_before_allocation(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 1) + b"k"
    huge = 1 << 60
    cases = {
        "many tensors": b"GGUF" + struct.pack("<IQQ", 3, huge, 0),
        "many dimensions": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<I", 1 << 31) + bytes(99),
        "no alignment": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment" + struct.pack("<II", 4, 0),
        "not gguf": b"NOPE" + bytes(100),
        "empty": b"",
        "short": b"GG",
        "old version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        "many keys": b"GGUF" + struct.pack("<IQQ", 3, 0, huge),
        "long key": head + struct.pack("<Q", huge),
        "long string": head + key + struct.pack("<IQ", 8, huge),
        "long array": head + key + struct.pack("<IIQ", 9, 4, huge),
        "long string array": head + key + struct.pack("<IIQ", 9, 8, 3_000_000),
        "nested arrays": head + key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50,
        "unknown type": head + key + struct.pack("<I", 77),
    }
    for name, data in cases.items():
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        with pytest.raises(UnsupportedModelError):
            print(name, read_gguf_header(path))


@settings(max_examples=200)
@given(cut=st.integers(0, 400), noise=st.binary(max_size=30), at=st.integers(0, 400))
def test_damaged_files_never_crash(tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes, at: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    whole += struct.pack("<Q", 1) + b"a" + struct.pack("<IQ", 8, 3) + b"xyz"
    whole += struct.pack("<Q", 1) + b"b" + struct.pack("<IIQ", 9, 8, 3) + (struct.pack("<Q", 2) + b"hi") * 3
    data = (whole[:at] + noise + whole[at + len(noise) :])[: max(cut, 1)]
    path.write_bytes(data)
    with contextlib.suppress(UnsupportedModelError):
        read_gguf_header(path)


def test_the_error_names_file_and_version(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"ABCD" + bytes(100))
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf is damaged or not a GGUF file"):
        read_gguf_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(UnsupportedModelError, match="version 9"):
        read_gguf_header(path)

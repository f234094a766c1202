"""Tensors of a file, copied to a device in one pass. Without a GPU the device is the CPU, and nothing is pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ConfigError
from engine.loader.safetensors import read_header
from engine.lora import gpu_file
from engine.lora.gpu_file import GpuFile

pytestmark = pytest.mark.wing("engine.lora")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of several pieces, whose last tensor does not start at a multiple of its items."""
    monkeypatch.setattr(gpu_file, "PIECE_BYTES", 512)
    tensors = {
        "a": torch.randn(31, 7, dtype=torch.float64), "b": torch.randn(5, 33, dtype=torch.float32),
        "c": torch.randn(3, 3).to(torch.bfloat16), "d": torch.randn(9).to(torch.float16),
    }  # fmt: skip
    save_file(tensors, tmp_path / "adapter.safetensors")
    return tmp_path / "adapter.safetensors"


def test_tensors_are_those_of_the_file(path: Path) -> None:
    from safetensors.torch import load_file

    stored, wanted, file = read_header(path), load_file(path), GpuFile(DEVICE)
    for _ in range(2):  # the buffers are used again
        found = dict(zip(stored, file.copy(path, stored.values()), strict=True))
        assert {name: each.dtype for name, each in found.items()} == {n: each.dtype for n, each in wanted.items()}
        assert all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted)


def test_items_may_start_anywhere(path: Path) -> None:
    """Headers need not be padded, so that tensors need not be aligned."""
    stored, content = read_header(path), path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    moved = read_header(path)
    assert moved["a"].first_byte % 8
    before = GpuFile(DEVICE)
    path.with_name("before").write_bytes(content)
    for one, other in zip(
        before.copy(path, moved.values()), before.copy(path.with_name("before"), stored.values()), strict=True
    ):
        assert torch.equal(one, other)


def test_damaged_files_are_refused(path: Path) -> None:
    stored = read_header(path)
    path.write_bytes(path.read_bytes()[:-1])  # after the header was read
    with pytest.raises(ConfigError, match="damaged"):
        GpuFile(DEVICE).copy(path, stored.values())
    with pytest.raises(ConfigError, match="damaged"):
        GpuFile(DEVICE).copy(path, [replace(stored["a"], shape=(31, 8))])
    with pytest.raises(ConfigError, match="cannot be read"):
        GpuFile(DEVICE).copy(path.with_name("nothing"), stored.values())

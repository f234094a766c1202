"""The assembly that unpacks nibbles, which the interpreter does not run: every instruction on every word, by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from kernels.gpu.quantization.nibbles import UNPACK_E2M1, UNPACK_INT4
from kernels.quantization.mxfp4 import MAGNITUDES, pack_mxfp4

OR_OF_AND = 0xEA  # lop3's table of (a & b) | c


def run(assembly: str, words: torch.Tensor) -> list[torch.Tensor]:
    """Run assembly on int16 words, of which each two share a register. Returns the words of $0 to $3, int16."""
    registers = {"$4": words.numpy().view(np.uint32)}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for name, arguments in re.findall(r"(\S+) ([^;{}]*);", assembly):
        target, *sources = [part.strip() for part in arguments.split(",")]
        if name == ".reg":
            continue
        numbers = [value(source) for source in sources]
        if name == "lop3.b32":
            assert numbers.pop() == OR_OF_AND
            registers[target] = (numbers[0] & numbers[1]) | numbers[2]
        else:
            operation = {"and.b32": np.bitwise_and, "shl.b32": np.left_shift, "shr.u32": np.right_shift}[name]
            registers[target] = operation(*numbers).astype(np.uint32)
    return [torch.from_numpy(registers[f"${index}"].view(np.int16)) for index in range(4)]


def test_four_bits_are_put_under_an_exponent() -> None:
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for index, bits in enumerate(run(UNPACK_INT4.value, words)):
        assert torch.equal(bits.view(torch.bfloat16).float(), 128.0 + ((words.int() >> 4 * index) & 15))


def test_e2m1_becomes_float16() -> None:
    blocks = torch.randint(0, 256, (64, 4, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    words, _ = pack_mxfp4(blocks, blocks[..., 0])  # of chunks of 128 columns: word j holds j, 32 + j, 64 + j, 96 + j
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    numbers = values[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1).int()].view(64, 4, 32)
    for index, bits in enumerate(run(UNPACK_E2M1.value, words)):
        assert torch.equal(bits.view(torch.float16).float() * 2**14, numbers[:, index])
    assert len(torch.unique(numbers)) == 15  # all there are; zero has two signs

"""Slots of a host tier over a memory map."""

from __future__ import annotations

import mmap

import torch

from engine.host_tier.buffer import host_buffer_over


def test_slots_over_a_memory_map_share_its_bytes() -> None:
    memory = mmap.mmap(-1, 4096)
    slots = host_buffer_over(memory, 5, 48)
    assert slots.shape == (5, 48)
    slots[3] = torch.arange(48)
    assert memory[3 * 48 : 4 * 48] == bytes(range(48))

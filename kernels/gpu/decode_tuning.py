"""Settings of `paged_decode` by what it is launched for. Plain decisions, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """tile: keys per step of a program's loop. num_stages: of its pipeline, the step that computes among them.
    programs_per_sm: how many programs a multiprocessor gets when rows and heads alone are too few.
    lists_blocks: the ids of a program's blocks are read before its loop and all stages hold keys and values; else
    half of the stages wait for ids, which takes half the shared memory, so that more programs fit.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    lists_blocks: bool = False


LONG_TILES = DecodeTuning(32, 2, 7, 2)
FEW_HEADS = DecodeTuning(64, 4, 4, 2, lists_blocks=True)  # two programs fill a multiprocessor: they spread evenly
SHORT_TILES = DecodeTuning(16, 1, 6, 4)  # one warp needs no barriers; many programs fit side by side
MANY_PROGRAMS = DecodeTuning(32, 1, 4, 4)
FOUR_BYTES = DecodeTuning(32, 2, 4, 2)
ONE_BYTE = DecodeTuning(64, 4, 5, 4)
ONE_BYTE_MANY_ROWS = DecodeTuning(64, 1, 4, 8)


def choose_tuning(num_rows: int, num_kv_heads: int, group: int, itemsize: int) -> DecodeTuning:
    """For K and V of `itemsize` bytes. The fastest, or within 1% of it, in whole captured steps on an H200 at 1k and
    32k of context (decision 0087), where the rotation before lets these programs start late, so that they spread.

    Step in us of Qwen3-0.6B at 8 | 32 | 64 rows, which does without that up to 16 rows: FEW_HEADS 941 | 1746 | 2861,
    LONG_TILES 1006 | 1939 | 2773, SHORT_TILES 999 | 2216 | 2710. Of Qwen2.5-7B at 8 | 32 | 64 | 128: 4118 | 4637 |
    5278 | 6771, LONG_TILES 4089 | 4627 | 5197 | 6611, SHORT_TILES 4093 | 4862 | 5517 | 6586. More programs than two
    to a multiprocessor come in two rounds with FEW_HEADS: Qwen3-0.6B at 40 | 48 rows 2352 | 2452, LONG_TILES 1968 |
    2198.

    By the kernel's own benchmark: 256 rows, Qwen2.5-7B and Qwen3-0.6B, MANY_PROGRAMS 128 and 247 us, SHORT_TILES 133
    and 255. 8-bit K and V of Qwen2.5-7B, 1 x 32k | 8 x 1k | 64 x 1k | 256 x 1k: ONE_BYTE 16.0 | 8.7 | 25.5 | 76,
    ONE_BYTE_MANY_ROWS 21.1 | 10.7 | 30.5 | 71.
    """
    if itemsize == 4:
        return FOUR_BYTES
    programs = num_rows * num_kv_heads
    if itemsize == 1:
        return ONE_BYTE_MANY_ROWS if programs >= 512 else ONE_BYTE
    if programs >= 512:
        return MANY_PROGRAMS if programs >= 1024 else SHORT_TILES
    return FEW_HEADS if group <= 4 and programs <= 264 else LONG_TILES


def num_splits(num_rows: int, num_kv_heads: int, device: torch.device, tuning: DecodeTuning) -> int:
    """Programs that share a row's keys of one KV head; 1 when rows and heads alone fill the GPU."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(MAX_SPLITS, tuning.programs_per_sm * num_sms // (num_rows * num_kv_heads)))


def tokens_ahead(num_rows: int) -> int:
    """Keys that a program asks for while the previous kernel still runs; more take bandwidth from that kernel.

    A step of Qwen3-0.6B at 4 | 8 | 32 rows without: 1021 | 1173 | 1913 us, with 32 keys 986 | 1149 | 1895, with all
    of 1k 1000 | 1183 | 2043.
    """
    return 32 if num_rows <= 32 else 0

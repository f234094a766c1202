"""The GPU engine, compiled where there is a GPU, else through Triton's interpreter: a process of its own."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import take_short_cuts

    take_short_cuts()
torch.set_num_threads(1)

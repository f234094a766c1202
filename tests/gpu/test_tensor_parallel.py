"""Ranks on two GPUs give the tokens of one, and end together."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import DeviceLostError, Engine
from engine.gpu.config import GpuConfig
from engine.request import SamplingParams
from tests.cluster.test_tensor_parallel import followers_of
from tests.gpu.models import save_tiny_model
from tests.gpu.test_engine import generate, greedy

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS = [[(7 * i + 3 * j * j) % 97 for j in range(length)] for i, length in enumerate((5, 19, 200, 180, 190, 170))]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=3),
    replace(GREEDY, temperature=1.0, seed=4, top_p=0.8, top_k=30, logprobs=2),
    replace(GREEDY, presence_penalty=0.8, bad_words=((5, 6),)),
    replace(GREEDY, prompt_logprobs=1),
    GREEDY,
]


def open_ranks(model: Path, tp: int, overlap: bool = True, graphs: bool = True) -> Engine:
    """In float32, where sums over ranks hardly differ."""
    config = EngineConfig(
        str(model), device="cuda", dtype="float32", tp=tp, num_gpu_blocks=128, max_num_seqs=8,
        max_num_batched_tokens=1024, max_model_len=250, quant_mode="none",
    )  # fmt: skip
    parts = assemble(config, gpu=GpuConfig(overlap=overlap, use_cuda_graph=graphs))
    return Engine(parts.engine.scheduler, parts.runner, vocab_size=97, eos_token_ids=frozenset())


@pytest.mark.parametrize(("overlap", "graphs"), [(True, True), (False, True), (True, False)])
def test_two_ranks_give_the_tokens_of_one(overlap: bool, graphs: bool, tmp_path: Path) -> None:
    """All prompts at once, whose sums go through NCCL, and short ones alone."""
    model = save_tiny_model(tmp_path)
    found = []
    for tp in (1, 2):
        engine = open_ranks(model, tp, overlap, graphs)
        found.append([generate(engine, PARAMS, PROMPTS), generate(engine, greedy(30), PROMPTS[:2])])
        del engine
        gc.collect()
    assert found[0] == found[1]


def lose_a_rank(model: str) -> None:
    """In a process of its own, whose kernels wait for the lost rank until it ends."""
    engine = open_ranks(Path(model), 2)
    request = engine.add_request(PROMPTS[0], replace(GREEDY, max_tokens=200))
    while len(request.output_token_ids) < 5:
        engine.step()
    (follower,) = followers_of(os.getpid())
    os.kill(follower, signal.SIGKILL)
    time.sleep(0.3)
    try:
        engine.step()
    except DeviceLostError as error:
        print(f"lost: {error}", flush=True)
    os._exit(0)


def test_a_rank_that_dies_ends_the_engine(tmp_path: Path) -> None:
    code = "import sys; from tests.gpu.test_tensor_parallel import lose_a_rank; lose_a_rank(sys.argv[1])"
    command = [sys.executable, "-c", code, str(save_tiny_model(tmp_path))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "lost: rank 1 of the model ended" in found.stdout

"""Workers whose ranks have whole experts, through HTTP: tokens, while experts move, and metrics of both."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.model_folder import with_tokenizer
from mini_infer import LLM, SamplingParams
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE
from tests.harness.cluster import free_ports, metric, running_cluster

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
COUNTS = (
    r"mini_infer_expert_placements_total{.*}",
    *(rf'mini_infer_expert_tokens_total{{.*rank="{rank}".*}}' for rank in (0, 1)),
)
READ_SECONDS = 120.0  # counts are read every 10 seconds


@pytest.mark.soak
def test_workers_move_experts_while_they_serve(tmp_path: Path) -> None:
    name = "qwen3-moe"
    (flag,), _ = with_tokenizer([f"--model={TINY_MODELS[name].save(tmp_path / name)}"], tmp_path / "served")
    settings = {"load_format": "dummy", "num_gpu_blocks": 400, "quant_mode": "none", "dtype": "float32"}
    prompts = [[(7 * i + 11 * j) % (VOCAB_SIZE - 8) + 8 for j in range(30 + 19 * i)] for i in range(6)]
    llm = LLM(flag.partition("=")[2], num_threads=1, **settings)
    expected = [completion.text for completion in llm.generate(prompts, GREEDY)]
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    ranks = ["--tp=2", "--expert-parallel", "--expert-rebalance-interval=10"]
    flags = [f"--{setting.replace('_', '-')}={value}" for setting, value in settings.items()]
    with running_cluster(
        engine_args=(flag, *flags), role_args={"decode": [*ranks, f"--metrics-port={port}"]}
    ) as cluster:
        deadline, answers = time.monotonic() + READ_SECONDS, []
        have_moved = False
        while not have_moved:  # and once more afterwards
            assert time.monotonic() < deadline
            have_moved = all(metric(url, count) > 0 for count in COUNTS)
            answers += [cluster.complete(prompt, GREEDY.max_tokens, model=name) for prompt in prompts]
        assert answers == expected * (len(answers) // len(prompts))
        assert 0.5 < metric(url, r"mini_infer_expert_balancedness{.*}") <= 1

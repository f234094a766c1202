"""A cluster whose pools are far too small: blocks go to the node agent's memory and come back, no token changes."""

from __future__ import annotations

import pytest

from mini_infer import LLM, SamplingParams
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.waiting import wait_until

PROMPTS = [f"conversation {i}: " + "once upon a time " * (3 + i % 5) for i in range(12)]
NUM_TOKENS = 60


def complete_all(cluster: Cluster) -> list[str]:
    return cluster.complete_all(PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(reference: LLM) -> list[str]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [completion.text for completion in reference.generate(PROMPTS, params)]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_tiny_pools_with_a_node_agent(expected: list[str], preemption: str) -> None:
    args = ["--model=dry-run", "--num-gpu-blocks=24", "--num-threads=1", f"--preemption={preemption}"]
    with running_cluster(engine_args=args, with_agent=True) as cluster:
        assert complete_all(cluster) == expected
        cluster.wait_quiet()
        cluster.services["agent"].kill()  # without the agent, workers go on by themselves
        assert complete_all(cluster) == expected
        cluster.wait_quiet()
        if preemption == "swap":
            cluster.start_service("agent")
            decode = cluster.services["decode-0"]

            def is_back() -> bool:
                assert complete_all(cluster) == expected
                return "node agent is there again" in decode.log()

            wait_until(is_back)
            assert complete_all(cluster) == expected  # from its memory, too
            cluster.wait_quiet()


def test_the_tier_outlives_a_worker(expected: list[str]) -> None:
    """Blocks that a worker evicted are cache hits after its restart."""
    args = ["--model=dry-run", "--num-gpu-blocks=40", "--num-threads=1"]
    with running_cluster(num_prefill=0, engine_args=args, with_agent=True) as cluster:
        assert complete_all(cluster) == expected
        cluster.wait_quiet()
        cluster.services["decode-0"].kill()
        cluster.start_service("decode-0")
        cluster.wait_ready(1)
        num_cached = 0  # whose blocks were evicted depends on the order in which they came
        for prompt, text in zip(PROMPTS, expected, strict=True):
            answer = cluster.ask(prompt, NUM_TOKENS)
            assert answer.choices[0].text == text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            num_cached += answer.usage.prompt_tokens_details.cached_tokens or 0
        assert num_cached > 0

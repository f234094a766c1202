"""Prompts of many chunks through a whole cluster: what decode pulls at the end, and what faults before it cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from engine import LLM, SamplingParams
from engine.scheduling.prefetches import MAX_PREFETCHES
from tests.harness.clients import async_client
from tests.harness.cluster import SHORT_LEASES, Cluster, free_ports, metric, running_cluster

CHUNK_TOKENS, BLOCK_TOKENS, NUM_PROMPT_TOKENS = 64, 16, 800
TRANSPORT = "cuda_ipc" if torch.cuda.is_available() else "shm"
NUM_REQUESTS, OUTPUT_TOKENS = 12, 16
CHUNKED = {"prefill": (f"--max-num-batched-tokens={CHUNK_TOKENS}",)}
ALWAYS_PREFILL = ("--local-prefill-tokens=0",)
PREFETCHED = r"mini_infer_kv_prefetched_tokens_total\{.*\}"


def make_prompts(seed: int, count: int = NUM_REQUESTS) -> list[str]:
    rng = random.Random(seed)  # a token a letter
    return ["".join(rng.choices("abcdefgh ", k=NUM_PROMPT_TOKENS + rng.randrange(100))) for _ in range(count)]


def expected_texts(llm: LLM, prompts: list[str]) -> list[str]:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    return [completion.text for completion in llm.generate(prompts, params)]


async def complete(client: openai.AsyncOpenAI, prompt: str, priority: int = 0) -> Any:
    extra = {"ignore_eos": True, "priority": priority}
    return await client.completions.create(
        model="dry-run", prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, extra_body=extra
    )


@pytest.fixture(scope="module")
def metrics() -> str:
    """Where the decode worker has its metrics."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def cluster(metrics: str) -> Iterator[Cluster]:
    roles = {**CHUNKED, "decode": (f"--metrics-port={metrics.rpartition(':')[2]}",)}
    with running_cluster(router_args=ALWAYS_PREFILL, role_args=roles) as running:
        yield running


def test_what_was_prefetched_is_not_pulled_again(cluster: Cluster, reference: LLM, metrics: str) -> None:
    (prompt,) = prompts = make_prompts(seed=1, count=1)
    before = metric(metrics, PREFETCHED)
    answer = cluster.ask(prompt, OUTPUT_TOKENS)
    assert [answer.choices[0].text] == expected_texts(reference, prompts)
    prefill, decode = cluster.legs_of(answer.id)
    num_ready = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert prefill["offered_tokens"] == num_ready
    assert decode["cached_tokens"] + decode["pulled_tokens"] == len(prompt)
    num_prefetched = metric(metrics, PREFETCHED) - before
    assert decode["cached_tokens"] == decode["prefetched_tokens"] == num_prefetched
    assert num_prefetched >= MAX_PREFETCHES * CHUNK_TOKENS  # steps are shorter than pulls
    assert metric(metrics, r'mini_infer_kv_prefetches_total\{model_name="dry-run",outcome="failed".*\}') == 0
    cluster.wait_quiet()


def test_a_prompt_of_which_nothing_is_left_to_pull(cluster: Cluster, reference: LLM) -> None:
    prompts = ["y" * (2 * CHUNK_TOKENS + 5)]  # what the last chunk adds costs less to compute
    answer = cluster.ask(prompts[0], OUTPUT_TOKENS)
    assert [answer.choices[0].text] == expected_texts(reference, prompts)
    _, decode = cluster.legs_of(answer.id)
    assert (decode["prefetched_tokens"], decode["pulled_tokens"]) == (2 * CHUNK_TOKENS, 0)
    assert (decode["transport"], decode["kv_pull_failed"]) == (TRANSPORT, False)
    cluster.wait_quiet()


def test_many_at_once_equal_one_engine(cluster: Cluster, reference: LLM) -> None:
    prompts = make_prompts(seed=100)
    assert cluster.complete_all(prompts, OUTPUT_TOKENS) == expected_texts(reference, prompts)
    cluster.wait_quiet()


async def test_clients_that_leave_in_mid_prompt_leave_nothing_behind(cluster: Cluster) -> None:
    num_left = 0
    for attempt in range(10):  # some may have their answers first
        async with async_client(cluster.url) as client:
            tasks = [asyncio.create_task(complete(client, prompt)) for prompt in make_prompts(seed=30 + attempt)]
            for number, task in enumerate(tasks):
                await asyncio.sleep(0.01 * (number % 3))
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        cluster.wait_quiet()
        num_left += sum(isinstance(end, asyncio.CancelledError) for end in ends)
        if num_left > NUM_REQUESTS // 2:
            return
    raise AssertionError(f"only {num_left} clients left in time")


async def test_a_worker_killed_in_mid_prompt_costs_no_token(reference: LLM) -> None:
    with running_cluster(2, 2, worker_args=SHORT_LEASES, router_args=ALWAYS_PREFILL, role_args=CHUNKED) as cluster:
        for kill in ("decode-0", "prefill-0"):
            for attempt in range(5):
                await asyncio.to_thread(cluster.start_killed)
                if await survive(cluster, reference, kill, make_prompts(seed=len(kill) * 10 + attempt)):
                    break
            else:
                raise AssertionError("every kill came too late to mean anything")


async def survive(cluster: Cluster, reference: LLM, kill: str, prompts: list[str]) -> bool:
    """Whether some prompts were open when the worker was killed. All have their answers."""
    before = cluster.load_of("decode-0")["kv_blocks_cached"]
    async with async_client(cluster.url) as client:
        tasks = [asyncio.create_task(complete(client, prompt)) for prompt in prompts]
        while cluster.load_of("decode-0")["kv_blocks_cached"] == before and not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)  # no request, or only the first few, decode then
        cluster.services[kill].kill()
        num_open = sum(not task.done() for task in tasks)
        answers = await asyncio.gather(*tasks)
    assert [answer.choices[0].text for answer in answers] == expected_texts(reference, prompts)
    cluster.wait_quiet()
    return num_open >= 3


async def test_prompts_that_give_way_on_either_side_keep_their_tokens(reference: LLM) -> None:
    """Pools with room for one of the prompts. Urgent ones come until some have met others in mid-prompt."""
    engine, [port] = ("--model=dry-run", "--num-gpu-blocks=70", "--num-threads=1"), free_ports(1)
    roles = {"prefill": (*CHUNKED["prefill"], f"--metrics-port={port}")}
    with running_cluster(engine_args=engine, router_args=ALWAYS_PREFILL, role_args=roles) as cluster:
        async with async_client(cluster.url) as client:
            for number in range(100):
                prompts = make_prompts(seed=1000 + number, count=4)
                tasks = [asyncio.create_task(complete(client, prompt)) for prompt in prompts[:3]]
                await asyncio.sleep(0.01 * (1 + number % 5))
                tasks.append(asyncio.create_task(complete(client, prompts[3], priority=-1)))
                answers = await asyncio.gather(*tasks)
                assert [answer.choices[0].text for answer in answers] == expected_texts(reference, prompts)
                if number >= 2 and metric(f"http://127.0.0.1:{port}", r"vllm:num_preemptions_total\{.*\}") > 2:
                    break
            else:
                raise AssertionError("nothing was preempted")
        cluster.wait_quiet()

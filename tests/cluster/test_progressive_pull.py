"""Prompts of many chunks through a whole cluster: what decode pulls at the end, and what faults before it cost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai

from engine.progressive_pulls.prefetches import MAX_PREFETCHES
from mini_infer import LLM, SamplingParams
from tests.harness.clients import async_client
from tests.harness.cluster import SHORT_LEASES, Cluster, free_ports, metric, running_cluster

CHUNK_TOKENS, NUM_PROMPT_TOKENS = 64, 800
NUM_REQUESTS, OUTPUT_TOKENS = 8, 16
CHUNKED = {"prefill": (f"--max-num-batched-tokens={CHUNK_TOKENS}",)}
ALWAYS_PREFILL = ("--local-prefill-tokens=0",)


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


def test_what_was_prefetched_is_not_pulled_again(reference: LLM) -> None:
    (prompt,) = prompts = make_prompts(seed=1, count=1)
    [port] = free_ports(1)
    metrics, roles = f"http://127.0.0.1:{port}", {**CHUNKED, "decode": (f"--metrics-port={port}",)}
    with running_cluster(router_args=ALWAYS_PREFILL, role_args=roles) as cluster:
        answer = cluster.ask(prompt, OUTPUT_TOKENS)
        assert [answer.choices[0].text] == expected_texts(reference, prompts)
        prefill, decode = cluster.legs_of(answer.id)
        num_ready = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        assert prefill["offered_tokens"] == num_ready
        assert decode["cached_tokens"] + decode["pulled_tokens"] == len(prompt)
        num_prefetched = metric(metrics, r"mini_infer_kv_prefetched_tokens_total\{.*\}")
        assert decode["cached_tokens"] == decode["prefetched_tokens"] == num_prefetched
        assert num_prefetched >= MAX_PREFETCHES * CHUNK_TOKENS  # steps are shorter than pulls
        assert metric(metrics, r'mini_infer_kv_prefetches_total\{model_name="dry-run",outcome="failed".*\}') == 0
        cluster.wait_quiet()


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
    """Pools have room for one of the prompts. Urgent ones arrive until some have preempted others in mid-prompt."""
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

"""Many tasks on one engine: each gets the answer it would get alone, and one that leaves frees its blocks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from common.errors import EngineError, InvalidRequestError, UnavailableError
from mini_infer import AsyncLLM, SamplingParams

PROMPTS = [f"{index} and {'the same again ' * (index % 5)}" for index in range(16)]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.1, top_k=40, seed=11, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM("dry-run", num_threads=1, num_gpu_blocks=256, max_num_seqs=20) as model:
        yield model


@pytest.fixture
async def slow_llm() -> AsyncIterator[AsyncLLM]:
    """Make an LLM with steps of 20 ms: a long request stays open for 18 s, however late this thread gets a core."""
    async with AsyncLLM("dry-run", num_threads=1, num_gpu_blocks=256, simulated_steps="base=0.02") as model:
        yield model


async def assert_idle(llm: AsyncLLM) -> None:
    """Check that no request is open and every block is free or cached, once earlier commands are done."""
    await llm.generate("x", SamplingParams(max_tokens=1))
    pool = llm.engine.kv.pool
    pool.check_integrity()
    assert pool.num_used == 0
    assert llm.engine.load().num_requests == 0


async def test_16_callers_equal_solo_runs(llm: AsyncLLM) -> None:
    alone = [(await llm.generate(prompt, SAMPLED))[0] for prompt in PROMPTS]

    async def streamed(prompt: str) -> str:
        return "".join([piece async for piece in llm.stream(prompt, SAMPLED)])

    async def generated(prompt: str) -> str:
        return (await llm.generate(prompt, SAMPLED))[0].text

    calls = [streamed(prompt) if index % 2 else generated(prompt) for index, prompt in enumerate(PROMPTS)]
    num_steps = llm.engine.num_steps
    assert await asyncio.gather(*calls) == [completion.text for completion in alone]
    assert llm.engine.num_steps - num_steps < 16 * 12 / 2, "they ran one after another, not in a batch"
    assert [c.token_ids for c in await llm.generate(PROMPTS, SAMPLED)] == [c.token_ids for c in alone]
    await assert_idle(llm)


async def test_a_stop_string_ends_one_answer_of_several(llm: AsyncLLM) -> None:
    whole = await llm.generate(PROMPTS[:2], SAMPLED)
    stop = whole[0].text[3:6]
    cut, other = await llm.generate(PROMPTS[:2], SAMPLED, stop=[stop])
    assert (cut.text, cut.stop_reason) == (whole[0].text[: whole[0].text.index(stop)], stop)
    assert other.text == whole[1].text.partition(stop)[0]
    assert "".join([piece async for piece in llm.stream(PROMPTS[0], SAMPLED, stop=stop)]) == cut.text
    await assert_idle(llm)


async def test_a_text_is_continued_with_its_first_space(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer.table, "strips_prefix_space", True)  # as with SentencePiece
    params = SamplingParams(max_tokens=3, temperature=0.0, logit_bias=((ord(" "), 100.0),))
    assert (await llm.generate("a", params))[0].text == "   "
    assert "".join([piece async for piece in llm.stream("a", params)]) == "   "
    assert (await llm.chat([{"role": "user", "content": "a"}], params)).text == "  "


async def test_a_forked_process_hears_that_it_has_no_engine(llm: AsyncLLM) -> None:
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            with pytest.raises(UnavailableError, match="make the AsyncLLM in it"):
                asyncio.new_event_loop().run_until_complete(asyncio.wait_for(llm.generate("a", SAMPLED), 20))
            os.write(write_end, b"refused")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        assert await asyncio.to_thread(answer.read) == b"refused"
    os.waitpid(pid, 0)


async def test_callers_of_several_event_loops(llm: AsyncLLM) -> None:
    async def ask() -> list[int]:
        return (await llm.generate(PROMPTS[0], SAMPLED))[0].token_ids

    here, there = await asyncio.gather(ask(), asyncio.to_thread(lambda: asyncio.run(ask())))
    assert here == there


async def test_a_cancelled_caller_frees_its_blocks(slow_llm: AsyncLLM) -> None:
    llm = slow_llm
    stream = llm.stream("stays", SAMPLED)
    text = await anext(stream)
    task = asyncio.create_task(llm.generate(["one", "two"], LONG))
    while llm.engine.load().num_requests < 2:  # those two, and perhaps the one that stays
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    text += "".join([piece async for piece in stream])
    assert text == (await llm.generate("stays", SAMPLED))[0].text
    await assert_idle(llm)


async def test_a_stream_that_is_left_frees_its_blocks(llm: AsyncLLM) -> None:
    async with aclosing(llm.stream("Hello", LONG)) as stream:
        async for _ in stream:
            break
    await assert_idle(llm)
    async for _ in llm.stream("Hello", LONG):  # without aclosing: the event loop closes it when it is collected
        break
    await asyncio.sleep(0)
    await assert_idle(llm)


def test_callers_whose_event_loop_is_gone_free_their_blocks() -> None:
    llm = AsyncLLM("dry-run", num_threads=1, num_gpu_blocks=256, simulated_steps="base=0.02")
    loop = asyncio.new_event_loop()
    stream = llm.stream("Hello", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def look() -> None:
        async with llm:
            while llm.engine.load().num_requests:
                await asyncio.sleep(0.001)
            await assert_idle(llm)

    asyncio.run(look())
    assert llm.engine.num_steps < LONG.max_tokens


async def test_a_bad_prompt_ends_its_caller_alone(llm: AsyncLLM) -> None:
    stream = llm.stream("stays", SAMPLED)
    text = await anext(stream)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        await llm.generate([[1, 2], [99999]], LONG)
    with pytest.raises(InvalidRequestError, match="integers"):
        await llm.generate([["not", "tokens"]], LONG)  # type: ignore[arg-type]
    assert text + "".join([piece async for piece in stream]) == (await llm.generate("stays", SAMPLED))[0].text
    await assert_idle(llm)


async def test_a_bug_in_an_abort_ends_every_caller(slow_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = slow_llm
    open_call = asyncio.create_task(llm.generate("Hello", LONG))

    def fail(_: object) -> None:
        raise ValueError("a list lacks it")

    monkeypatch.setattr(llm.engine, "abort", fail)
    async with aclosing(llm.stream("left", LONG)) as stream:
        await anext(stream)
    with pytest.raises(EngineError, match="a list lacks it"):
        await open_call


async def test_close_ends_what_is_open(slow_llm: AsyncLLM) -> None:
    llm = slow_llm
    stream = llm.stream("Hello", LONG)
    await anext(stream)
    await llm.close()
    await llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        [piece async for piece in stream]
    with pytest.raises(UnavailableError, match="closed"):
        await llm.generate("too late")
    assert not llm._thread.is_alive()


async def test_chat(llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = await llm.chat(messages, SAMPLED)
    prompt = llm.tokenizer.apply_chat_template(messages)
    assert answer.prompt_token_ids == prompt
    assert answer.text == (await llm.generate(prompt, SAMPLED))[0].text
    with pytest.raises(InvalidRequestError, match="messages cannot be set"):
        await llm.chat(messages, SAMPLED, {"messages": "x"})

"""pydantic-ai over chat completions and over the Responses API: a tool loop, streamed and not, and typed answers."""

from __future__ import annotations

import asyncio

from common_cases import HELLO, MODEL, PERSON, WEATHER, Person, report
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(temperature=0.0, max_tokens=200)
cities: list[str] = []


def get_weather(city: str) -> dict[str, str]:
    """The current weather in a city."""
    cities.append(city)
    return report(city)


async def check(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    agent = Agent(model, tools=[get_weather], model_settings=SETTINGS)
    cities.clear()
    answer = await agent.run(WEATHER)
    assert cities[0] == "Paris", cities
    assert "17" in answer.output, answer.output
    plain = Agent(model, model_settings=SETTINGS)
    whole = (await plain.run(HELLO)).output
    async with plain.run_stream(HELLO) as streamed:
        deltas = [delta async for delta in streamed.stream_text(delta=True, debounce_by=None)]
    assert len(deltas) > 1
    assert "".join(deltas) == whole
    for kind in (ToolOutput(Person), NativeOutput(Person), PromptedOutput(Person)):
        found = (await Agent(model, output_type=kind, model_settings=SETTINGS).run(PERSON)).output
        assert found == Person(name="Ann", age=31), (kind, found)


async def main() -> None:
    await check(OpenAIChatModel(MODEL))
    await check(OpenAIResponsesModel(MODEL))


asyncio.run(main())

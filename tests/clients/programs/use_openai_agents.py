"""The Agents SDK with its default model class, which calls the Responses API: tools, typed answers, conversations."""

from __future__ import annotations

import asyncio
import json

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from common_cases import MODEL, PERSON, WEATHER, Person, report

SETTINGS = ModelSettings(temperature=0.0, max_tokens=200)
cities: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The current weather in a city."""
    cities.append(city)
    return json.dumps(report(city))


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent(name="a", instructions="", model=MODEL, tools=[get_weather], model_settings=SETTINGS)
    answer = await Runner.run(agent, WEATHER)
    assert cities[0] == "Paris", cities
    assert "17" in answer.final_output, answer.final_output
    usage = answer.context_wrapper.usage
    assert usage.requests >= 2
    assert usage.output_tokens > 0
    assert usage.input_tokens_details.cached_tokens > 0

    cities.clear()
    streamed = Runner.run_streamed(agent, WEATHER)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert cities[0] == "Paris", cities
    assert streamed.final_output == answer.final_output, (streamed.final_output, answer.final_output)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed"), kinds
    assert {"response.function_call_arguments.delta", "response.output_text.delta"} <= set(kinds), set(kinds)

    typed = Agent(name="b", instructions="", model=MODEL, output_type=Person, model_settings=SETTINGS)
    assert (await Runner.run(typed, PERSON)).final_output == Person(name="Ann", age=31)

    plain = Agent(name="c", instructions="", model=MODEL, model_settings=SETTINGS)
    first = await Runner.run(plain, "My name is Bob. Say hello.")
    again = await Runner.run(plain, "What is my name?", previous_response_id=first.last_response_id)
    assert "Bob" in again.final_output, again.final_output


asyncio.run(main())

"""instructor in each of its modes for OpenAI's API, and its partial and iterable answers."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from common_cases import MODEL, PERSON, Person
from instructor import Mode

MESSAGES = [{"role": "user", "content": PERSON}]
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS)


def main() -> None:
    for mode in MODES:
        create = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode).chat.completions
        limit = "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"
        options: dict[str, Any] = {"model": MODEL, "temperature": 0.0, limit: 200}
        found = create.create(messages=MESSAGES, response_model=Person, max_retries=0, **options)
        assert (found.name, found.age) == ("Ann", 31), (mode, found)
        if mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
            *_, last = create.create_partial(messages=MESSAGES, response_model=Person, **options)
            assert (last.name, last.age) == ("Ann", 31), (mode, last)
    several = instructor.from_openai(openai.OpenAI(max_retries=0), mode=Mode.TOOLS).chat.completions
    people = [*several.create_iterable(messages=MESSAGES, response_model=Person, model=MODEL, max_tokens=200)]
    assert people


main()

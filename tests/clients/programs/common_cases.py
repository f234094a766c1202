"""The questions of every program, in words that a model of half a billion parameters understands."""

from __future__ import annotations

from pydantic import BaseModel

MODEL = "qwen"
HELLO = "Say hello to Ann."
WEATHER = "What is the weather in Paris right now?"
PERSON = "Ann is 31 years old."


class Person(BaseModel):
    name: str
    age: int


def report(city: str) -> dict[str, str]:
    return {"temperature": "17 C", "sky": "cloudy"}

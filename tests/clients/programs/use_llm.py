"""The command `llm`, with the server as an extra model of OpenAI's API: streamed and not, a schema, a tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from common_cases import HELLO, MODEL, PERSON, WEATHER

FUNCTION = """
def get_weather(city: str) -> dict:
    "The current weather in a city."
    return {"temperature": "17 C", "sky": "cloudy"}
"""


def llm(*arguments: str) -> str:
    command = [
        str(Path(sys.executable).with_name("llm")),
        *arguments,
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "200",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    fields = {"model_id": MODEL, "model_name": MODEL, "api_base": os.environ["OPENAI_BASE_URL"]}
    models = [{**fields, "supports_tools": True, "supports_schema": True}]
    Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps(models))  # YAML, too
    assert "Ann" in llm("-m", MODEL, HELLO)
    assert llm("-m", MODEL, "--no-stream", HELLO) == llm("-m", MODEL, HELLO)
    assert json.loads(llm("-m", MODEL, "--schema", "name, age int", PERSON)) == {"name": "Ann", "age": 31}
    assert "17" in llm("-m", MODEL, "--functions", FUNCTION, WEATHER)


main()

"""Streams through OpenAI's package for Node, which is installed once into `build/`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.common.tools.tool_templates import HERMES_TEMPLATE
from tests.harness.router import replying
from tests.router.tools.test_tool_calls import ARGUMENTS, ONE, TOOLS, TWO

VERSION = "6.49.0"
FOLDER = Path(__file__).parents[3] / "build" / f"openai-node-{VERSION}"
# Prints the events of its stream helper and the final result, one line of JSON each.
SCRIPT = """
import OpenAI from "openai";
const { baseURL, body } = JSON.parse(process.argv.at(-1));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const show = (kind, value) => console.log(JSON.stringify([kind, value]));
const stream = client.chat.completions.stream(body);
for (const kind of ["content.done", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"])
  stream.on(kind, (event) => show(kind, event));
show("final", await stream.finalChatCompletion());
"""
pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="node or npm is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    if not (FOLDER / "node_modules" / "openai").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--prefix",
            ".",
            f"openai@{VERSION}",
        ]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install openai@{VERSION}: {done.stderr[-300:]}")
    (FOLDER / "stream.mjs").write_text(SCRIPT)


async def fired(reply: str, **fields: Any) -> dict[str, list[Any]]:
    """Return the payloads of each kind of event."""
    body = {"model": "dry-run", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500, **fields}
    async with replying(reply, template=HERMES_TEMPLATE) as c:
        request = json.dumps({"baseURL": f"http://127.0.0.1:{c.port}/v1", "body": body})
        node = await asyncio.create_subprocess_exec(
            "node", "stream.mjs", request, cwd=FOLDER, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(node.communicate(), 60)
        finally:
            if node.returncode is None:
                node.kill()
    assert node.returncode == 0, err.decode()
    events: dict[str, list[Any]] = {}
    for line in out.splitlines():
        kind, value = json.loads(line)
        events.setdefault(kind, []).append(value)
    return events


async def test_each_call_is_told_complete() -> None:
    events = await fired(f"I look.\n{ONE}\n{TWO}", tools=TOOLS)
    done = [(call["name"], call["arguments"]) for call in events["tool_calls.function.arguments.done"]]
    assert done == [("get_weather", ARGUMENTS), ("get_time", "{}")]
    deltas = [event["arguments_delta"] for event in events["tool_calls.function.arguments.delta"]]
    assert "".join(deltas) == ARGUMENTS + "{}"
    [final] = events["final"]
    assert final["choices"][0]["finish_reason"] == "tool_calls"
    message = final["choices"][0]["message"]
    assert message["content"] == "I look."
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == done


async def test_content_is_told_complete() -> None:
    events = await fired("Hello", max_tokens=4)
    assert [event["content"] for event in events["content.done"]] == ["Hell"]
    assert events["final"][0]["choices"][0]["finish_reason"] == "length"

"""--chat-template, the parsers by flag, and tools for models whose template takes none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import from_args
from common.errors import ConfigError
from common.text.chat_template import TemplateUse
from common.text.tokenizer import Tokenizer
from common.tools.json_calls import HERMES
from common.tools.tool_format import tool_format
from router.chat_templates.settings import BUILT_IN
from router.chat_templates.templates import with_templates
from router.config import RouterConfig
from tests.harness.router import DRY_RUN, cluster
from tests.harness.scripted_worker import Script

TOOL: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
OTHER: Any = {"type": "function", "function": {"name": "get_day", "parameters": {"type": "object"}}}
CALL: Any = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": {"zone": "CET"}}}
CALL_TEXT = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
USER, SYSTEM = {"role": "user", "content": "When?"}, {"role": "system", "content": "Be brief."}
CONVERSATION: Any = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "12:00"},
    {"role": "tool", "content": "12:01"},
    {"role": "user", "content": "Sure?"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""


def prepared(template: str, chat_template: str = "", tool_use: str = "") -> Tokenizer:
    templates = {"default": template} | ({"tool_use": tool_use} if tool_use else {})
    config = from_args(RouterConfig, ["--decode", "a:1", "--chat-template", chat_template])
    [found] = with_templates(config, [DRY_RUN.with_templates(templates)])
    return found


def rendered(tokenizer: Tokenizer, messages: Any, **fields: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(messages, **fields), skip_special=False)


def test_tools_are_described_in_the_system_message() -> None:
    tokenizer = prepared(PLAIN)
    assert tool_format(tokenizer.tool_template) is HERMES
    text = rendered(tokenizer, [SYSTEM, USER], tools=[TOOL, OTHER])
    system, user = text.removeprefix("[system]").split("[user]")
    assert user == "When?"
    assert system.startswith("Be brief.\n\nYou can call functions.")
    described = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in described] == [TOOL["function"], OTHER["function"]]
    assert rendered(tokenizer, [USER], tools=[TOOL]).startswith("[system]You can call functions.")
    assert rendered(tokenizer, [SYSTEM, USER]) == "[system]Be brief.[user]When?", "without tools nothing changes"


def test_calls_of_the_generic_prompt_have_one_format() -> None:
    def started(template: str, parser: str) -> Tokenizer:
        config = from_args(RouterConfig, ["--decode", "a:1", "--tool-call-parser", parser])
        [found] = with_templates(config, [DRY_RUN.with_templates({"default": template})])
        return found

    for parser in ("auto", "hermes"):
        assert "tool_use" in started(PLAIN, parser).templates
    with pytest.raises(ConfigError, match=r"llama3_json: a model's chat template takes no tools.* format hermes"):
        started(PLAIN, "llama3_json")
    own = PLAIN + "{% if tools %}{{ tools }}{% endif %}"
    assert started(own, "llama3_json").templates == {"default": own}


def test_calls_and_results_become_plain_messages() -> None:
    text = rendered(prepared(PLAIN), CONVERSATION, tools=[TOOL])
    results = "".join(f"<tool_response>\n{time}\n</tool_response>\n" for time in ("12:00", "12:01"))
    assert text.endswith(f"[user]When?[assistant]{CALL_TEXT}\n{CALL_TEXT}[user]{results}Sure?")


def test_a_template_that_refuses_system_messages_shows_tools_to_the_user() -> None:
    text = rendered(prepared(STRICT), CONVERSATION, tools=[TOOL])
    assert text.startswith("[user]You can call functions.")
    assert [part.partition("]")[0] for part in text.split("[")[1:]] == ["user", "assistant", "user"]


def test_models_that_take_tools_keep_their_templates() -> None:
    own = PLAIN + "{% if tools %}{{ tools }}{% endif %}"
    assert prepared(own).templates == {"default": own}
    assert prepared(PLAIN, tool_use=own).templates == {"default": PLAIN, "tool_use": own}


def test_markup_in_results_does_not_become_special_tokens() -> None:
    tokenizer = prepared(PLAIN)
    conversation = [USER, {"role": "tool", "content": "<eos>"}]
    assert tokenizer.special_id_of["<eos>"] not in tokenizer.apply_chat_template(conversation, [TOOL])


def test_another_template_replaces_the_models(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert rendered(prepared(PLAIN, str(path), tool_use=PLAIN), [SYSTEM, USER]) == "<Be brief.><When?>"


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_show_every_message_and_the_tools(name: str) -> None:
    tokenizer = prepared(PLAIN, name)
    answer = {"role": "assistant", "content": "Now."}
    text = rendered(tokenizer, [SYSTEM, USER, answer, USER])
    assert [text.count(word) for word in ("Be brief.", "When?", "Now.")] == [1, 2, 1]
    assert len(text) > len(rendered(tokenizer, [SYSTEM, USER, answer, USER], use=TemplateUse(False)))
    assert rendered(tokenizer, CONVERSATION, tools=[TOOL]).count("get_time") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat-template", "absent.jinja"], "absent.jinja.*built in are alpaca, chatml"),
        (["--chat-template", "broken"], "does not compile"),
        (["--chat-template", "chatml", "--models", "a=b,c=d"], "--models names several"),
    ],
)
def test_templates_that_cannot_be_used(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_text("{% if %}")
    config = from_args(RouterConfig, ["--decode", "a:1", *flags])
    with pytest.raises(ConfigError, match=message):
        with_templates(config, [DRY_RUN] * (1 + flags.count("--models")))


async def test_a_model_without_tools_of_its_own_calls_them() -> None:
    async with cluster(script=Script(reply=list(CALL_TEXT.encode())), info={"max_model_len": 4096}) as c:
        answer = await c.openai.chat.completions.create(
            model="dry-run", messages=CONVERSATION[:1], tools=[TOOL], max_tokens=500
        )
    calls: Any = answer.choices[0].message.tool_calls
    [call] = calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"zone": "CET"})


async def test_parsers_by_flag() -> None:
    text = '<think>hm</think>[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'
    flags: Any = {"tool_call_parser": "mistral_list", "reasoning_parser": "deepseek_r1"}
    flags["tokenizer"] = DRY_RUN.with_templates({"default": PLAIN + "{{ tools }}"})
    info = {"max_model_len": 4096}
    async with cluster(script=Script(reply=list(text.encode())), info=info, **flags) as c:
        answer = await c.openai.chat.completions.create(
            model="dry-run", messages=CONVERSATION[:1], tools=[TOOL], max_tokens=500
        )
    message: Any = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_time"]
    assert message.model_extra["reasoning"] == "hm"


async def test_reasoning_stays_in_the_answer() -> None:
    tokenizer = DRY_RUN.with_templates({"default": PLAIN + "{# </think> #}"})
    script = Script(reply=list(b"<think>hm</think>yes"))
    for parser, content in (("auto", "yes"), ("none", "<think>hm</think>yes")):
        async with cluster(script=script, tokenizer=tokenizer, reasoning_parser=parser) as c:
            answer = (await c.chat(max_tokens=40)).json()
        assert answer["choices"][0]["message"]["content"] == content

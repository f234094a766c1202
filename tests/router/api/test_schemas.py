"""Every invalid request gets a 4xx in OpenAI's shape, quickly, and the next request works."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from tests.harness.router import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"items": [DEEP]}
JSON = {"content-type": "application/json"}
in_format = pytest.mark.wing("router.grammar")
with_tools = pytest.mark.wing("router.tools")
with_stops = pytest.mark.wing("router.stop_strings")
WINGS = {  # of fields that the core does not have
    **dict.fromkeys(("response_format", "structured_outputs"), in_format),
    "stop": with_stops,
    **dict.fromkeys(("chat_template_kwargs", "continue_final_message"), pytest.mark.wing("router.template_options")),
    **dict.fromkeys(("logprobs", "top_logprobs"), pytest.mark.wing("router.answer_details")),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), with_tools),
    **dict.fromkeys(
        (
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
        ),
        pytest.mark.wing("router.logit_rules"),
    ),
}


RAW_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not json": b"hello",
    "truncated": b'{"messages": [',
    "an array": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "byte order mark": b"\xef\xbb\xbf{}",
    "nul byte": b"\0{}",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": Infinity}',
    "duplicate key": b'{"prompt": "x", "n": 1, "n": 2}',
    "duplicate key deep": b'{"messages": [{"role": "user", "content": "a:b", "content": "c"}]}',
    "deep nesting": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "huge integer": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "comment": b'{"prompt": "x"} // no',
    "two values": b'{"prompt": "x"} {"prompt": "x"}',
    "surrogate as utf-8": b'{"prompt": "\xed\xa0\x80"}',
    "lone surrogate in a key": b'{"prompt": "x", "\\udfff": 1}',
    "utf-16": '{"prompt": "x"}'.encode("utf-16"),
    "huge exponent": b'{"prompt": "x", "temperature": 1e400}',
}
_MESSAGE_CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c1"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "evil": 1}]}, "messages"),
    ({"messages": MESSAGES * 5000}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 10_000_000}]}, "messages"),
    ({"messages": [[]]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": "x", "content": None}]}, "messages"),
    ({"messages": None}, "messages"),
]
_CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"logprobs": "true"}, "logprobs"),
    ({"stop_token_ids": [True]}, "stop_token_ids.0"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"model": 5}, "model"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**18}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 10_000}, "stop"),
    ({"seed": 1 << 64}, "seed"),
    ({"seed": -(1 << 64)}, "seed"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**12]}, "allowed_token_ids.0"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"tools": TOOLS * 2, "tool_choice": "none"}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 129}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools.0.function.parameters",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools.0.function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "unknown"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": "required", "tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"regex": "a" * 60_000}, "n": 20}, "n"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 4097}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {"const": "x" * 1_000_000}}, "n": 2}, "n"),
    ({"structured_outputs": {"json": {"const": "x" * 1_100_000}}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 20_000}}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"$ref": "#"}}},
        "response_format.json_schema.schema",
    ),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 1000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(i): 1 for i in range(17)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1, "tools": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"best_of": 2}, "best_of"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"user": "x" * 100_000}, "user"),
]


async def refused(c: Cluster, path: str, content: bytes, headers: dict[str, str] = JSON) -> dict[str, Any]:
    """Send a bad request; check status, shape and time, and that the next good one works. Returns the error."""
    num_before = len(c.decode[0].submits)
    limit = 0.1 if len(content) < 1 << 20 else 0.5
    for _ in range(3):  # a collection of garbage may fall into one measurement
        began = time.process_time()  # of client and router together; a busy machine does not change it
        answer = await c.http.post(path, content=content, headers=headers)
        seconds = time.process_time() - began
        if seconds < limit:
            break
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert len(c.decode[0].submits) == num_before
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    assert "Traceback" not in answer.text
    assert "/work" not in answer.text
    assert seconds < limit
    assert (await c.chat(max_tokens=1)).status_code == 200
    return {**error, "status": answer.status_code}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.wing("router.body_bounds")) if name.startswith("duplicate") else name
        for name in RAW_BODIES
    ],
)
async def test_bodies(c: Cluster, name: str) -> None:
    error = await refused(c, CHAT, RAW_BODIES[name])
    assert error["status"] == 400


@pytest.mark.parametrize("case", range(len(_MESSAGE_CASES)))
async def test_messages(c: Cluster, case: int) -> None:
    fields, param = _MESSAGE_CASES[case]
    error = await refused(c, CHAT, orjson.dumps(fields))
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[WINGS[name] for name in fields if name in WINGS])
        for case, (fields, _) in enumerate(_CHAT_CASES)
    ],
    ids=lambda case: str(_CHAT_CASES[case])[:40],
)
async def test_parameters(c: Cluster, case: int) -> None:
    fields, param = _CHAT_CASES[case]
    # The standard encoder, because some of these numbers are too large for the fast one.
    import json

    error = await refused(c, CHAT, json.dumps({"messages": MESSAGES, **fields}).encode())
    assert error["param"] == param
    assert param.split(".")[0] in error["message"] or param == "messages"


@pytest.mark.parametrize(
    ("fields", "param", "rule"),
    [
        pytest.param({"stop": list("abcdefghijklmnopq")}, "stop", "at most 16 texts", marks=with_stops),
        pytest.param({"stop": 5}, "stop", "at most 16 texts", marks=with_stops),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages.0.content", "only text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "text parts"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
            "messages.0.content", "only assistant", marks=pytest.mark.wing("router.message_parts"),
        ),
        ({"messages": [{"role": "user", "content": "x" * 497}], "max_tokens": 13}, "max_tokens",
         "must be at most 12, not 13"),
        pytest.param({"response_format": "json"}, "response_format", "must be an object", marks=in_format),
        pytest.param(
            {"response_format": {"type": "xml"}}, "response_format.type", "or 'structural_tag'", marks=in_format
        ),
    ],
    ids=str,
)  # fmt: skip
async def test_messages_name_the_rule(c: Cluster, fields: dict[str, Any], param: str, rule: str) -> None:
    error = await refused(c, CHAT, orjson.dumps({"messages": MESSAGES, **fields}))
    assert error["param"] == param
    assert rule in error["message"]


async def test_a_field_that_nobody_knows_has_a_code_of_its_own(c: Cluster) -> None:
    error = await refused(c, CHAT, orjson.dumps({"messages": MESSAGES, "colour": 1}))
    assert error["code"] == "unknown_parameter"


async def test_the_name_of_an_unknown_field_is_cut_in_errors(c: Cluster) -> None:
    error = await refused(c, CHAT, orjson.dumps({"messages": MESSAGES, "x" * 1_000_000: 1}))
    assert (error["param"], error["message"]) == ("x" * 64, "unknown field " + "x" * 64)
    error = await refused(c, CHAT, orjson.dumps({"messages": MESSAGES, "": 1}))
    assert error["message"] == "unknown field ''"


async def test_context_length(c: Cluster) -> None:
    error = await refused(c, CHAT, orjson.dumps({"messages": [{"role": "user", "content": "x" * 600}]}))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, your messages resulted"
    )
    fitting = [{"role": "user", "content": "x" * 497}]  # and three tokens of the template
    error = await refused(c, CHAT, orjson.dumps({"messages": fitting, "max_tokens": 20}))
    assert error["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 520 tokens (500 in the messages, "
        "20 in the completion). Please reduce the length of the messages or completion: max_tokens must be at most "
        "12, not 20."
    )
    error = await refused(c, CHAT, orjson.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}))
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, your messages has"
    )
    assert error["code"] == "context_length_exceeded"
    assert (await c.chat("x" * 508, max_tokens=1)).status_code == 200
    assert (await c.chat("x" * 508, max_tokens=None)).json()["usage"]["completion_tokens"] == 1


async def test_odd_text_is_text(c: Cluster) -> None:
    for text in ("\0", "a\0b", "\ufeff", "\U0010ffff", "\u202e", "a" * 300, "<eos><user>"):
        assert (await c.chat(text, max_tokens=1)).status_code == 200


@pytest.mark.wing("router.grammar")
@pytest.mark.parametrize("depth", [300, 900, 1000])
async def test_schemas_nested_too_deep(c: Cluster, depth: int) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    strict = '{"type":"json_schema","json_schema":{"strict":true,"schema":' + schema + "}}"
    for field, value in (("response_format", strict), ("structured_outputs", '{"json":' + schema + "}")):
        error = await refused(c, CHAT, f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":{value}}}'.encode())
        assert (error["param"], error["status"]) == (field, 400)


async def test_content_type_method_path_and_size(c: Cluster) -> None:
    body = orjson.dumps({"messages": MESSAGES})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert (await refused(c, CHAT, body, {"content-type": kind}))["status"] == 415
    for coding in ("gzip", "br", "x" * 5000):
        error = await refused(c, CHAT, body, {**JSON, "content-encoding": coding})
        assert error["status"] == 415
        assert coding[:32] in error["message"]
    assert (await refused(c, "/v1/nothing", body))["status"] == 404
    assert (await c.http.get(CHAT)).status_code == 405
    big = b'{"prompt": "' + b"x" * (17 << 20) + b'"}'
    assert (await c.http.post(CHAT, content=big, headers=JSON)).status_code == 413
    assert (await refused(c, CHAT, orjson.dumps({"messages": MESSAGES, "model": "other"})))["status"] == 404


async def test_a_body_without_a_length_is_bounded_too(c: Cluster) -> None:
    async def long() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * (1 << 20)

    assert (await c.http.post(CHAT, content=long(), headers=JSON)).status_code == 413
    assert (await c.chat(max_tokens=1)).status_code == 200


async def test_odd_labels_change_nothing(c: Cluster) -> None:
    for label in ("x" * 5000, "a\tb", "\xe9"):
        headers = [(name, label.encode("latin-1")) for name in (b"X-Request-Id", b"traceparent", b"X-Session-Id")]
        answer = await c.http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == answer.json()["id"]


@pytest.mark.wing("router.tokenize")
async def test_messages_as_other_servers_give_and_take_them_are_accepted(c: Cluster) -> None:
    answered = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None}  # fmt: skip
    part = {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}
    for same in (
        [answered, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": [part]}, {"role": "user", "content": "two"}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         {"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}],
    ):  # fmt: skip
        answers = [await c.http.post("/tokenize", json={"messages": [*MESSAGES, message]}) for message in same]
        assert {answer.status_code for answer in answers} == {200}
        assert len({tuple(answer.json()["tokens"]) for answer in answers}) == 1

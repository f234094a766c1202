"""Tool calls of a random model through real processes: their arguments follow the schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
import tokenizers

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from tests.common.tools.tool_templates import HERMES_TEMPLATE
from tests.engine.tiny_models import TinyModel
from tests.harness.cluster import Cluster, running_cluster, save_with_tokenizer

MESSAGES: Any = [{"role": "user", "content": "What is the weather like?"}]


class GetWeather(pydantic.BaseModel):
    """Say how the weather will be."""

    city: Annotated[str, pydantic.Field(pattern="^[A-Z][a-z]{2,9}$")]
    days: Annotated[int, pydantic.Field(ge=1, le=14)]
    unit: Literal["celsius", "fahrenheit"]


class GetTime(pydantic.BaseModel):
    zones: Annotated[list[Literal["CET", "UTC"]], pydantic.Field(min_length=1, max_length=3)]


KINDS: dict[str, type[pydantic.BaseModel]] = {"GetWeather": GetWeather, "GetTime": GetTime}
TOOLS: Any = [openai.pydantic_function_tool(kind) for kind in KINDS.values()]


def call_tokens() -> tokenizers.Tokenizer:
    """Bytes, and the markers around a call, so that a random model begins calls of its own."""
    backend = load_tokenizer(resolve_model("dry-run"))._backend
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    return backend


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    sizes = {"vocab_size": 320, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    folder = save_with_tokenizer(TinyModel("Llama", sizes), tmp_path_factory.mktemp("models") / "tiny")
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    (folder / "tokenizer.json").write_text(call_tokens().to_str())
    engine_args = (f"--model={folder}", "--num-gpu-blocks=1024", "--num-threads=1")
    with running_cluster(num_prefill=1, engine_args=engine_args) as running:
        yield running


def ask(cluster: Cluster, **fields: Any) -> Any:
    return cluster.client().chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=1500, temperature=1.0, **fields
    )


def test_required_calls_follow_their_schemas(cluster: Cluster) -> None:
    answer = ask(cluster, tool_choice="required", seed=3, n=6, logit_bias={"10": 3})  # 10: a line before another call
    names = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            KINDS[call.function.name].model_validate_json(call.function.arguments)
            names.add(call.function.name)
    assert names == set(KINDS)
    assert max(len(choice.message.tool_calls) for choice in answer.choices) > 1


def test_a_named_tool_is_called_once_and_the_openai_package_parses_it(cluster: Cluster) -> None:
    answer = cluster.client().chat.completions.parse(
        model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=500, temperature=1.0, seed=2,
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_strict_calls_of_a_free_text_follow_their_schemas(cluster: Cluster, is_parallel: bool) -> None:
    begin = call_tokens().token_to_id("<tool_call>")
    tools = [*TOOLS, {"type": "function", "function": {"name": "search", "strict": False}}]
    num_calls, num_texts, names = 0, 0, set()
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": tools, "parallel_tool_calls": is_parallel}
    answer: Any = cluster.client().chat.completions.create(
        **fields, max_tokens=400, temperature=1.0, seed=5, n=12, logit_bias={str(begin): 3}
    )
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        num_calls += len(calls)
        num_texts += bool(choice.message.content)
        assert is_parallel or len(calls) <= 1
        is_cut = choice.finish_reason == "length"
        for call in calls[:-1] if is_cut else calls:
            names.add(call.function.name)
            if call.function.name in KINDS:
                KINDS[call.function.name].model_validate_json(call.function.arguments)
            else:
                assert isinstance(json.loads(call.function.arguments), dict)
    assert num_calls >= 5
    assert num_texts > 0
    assert set(KINDS) <= names or not is_parallel

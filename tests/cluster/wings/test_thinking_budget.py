"""A bounded reasoning of a random model through real processes: alone, before a schema, and across a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from tests.engine.tiny_models import TinyModel
from tests.harness.clients import async_client
from tests.harness.cluster import Cluster, running_cluster, save_with_tokenizer
from tests.harness.jobs import same_after_a_kill

TEMPLATE = "{%- for message in messages %}[{{ message.content }}]{%- endfor %}<think>\n{# </think> #}"
MESSAGES: Any = [{"role": "user", "content": "again and again and again"}]
ONE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": ONE, "strict": True}}
ENDLESS = {"3": -100, "258": -100}  # what ends answers: of the model, of its tokenizer
BUDGET = 24
BOUNDED: list[dict[str, Any]] = [{"thinking_token_budget": BUDGET}, {"reasoning": {"max_tokens": BUDGET}}]


def thinking_tokens() -> tokenizers.Tokenizer:
    """Bytes, and markers that are tokens of their own but no special ones, as Qwen3 has them."""
    backend = load_tokenizer(resolve_model("dry-run"))._backend
    backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in ("<think>", "</think>")])
    return backend


END: Any = thinking_tokens().token_to_id("</think>")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    sizes = {"vocab_size": 320, "max_position_embeddings": 4096}
    folder = save_with_tokenizer(TinyModel("Llama", sizes), tmp_path_factory.mktemp("models") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer.json").write_text(thinking_tokens().to_str())
    engine_args = (f"--model={folder}", "--num-gpu-blocks=1024", "--num-threads=1")
    with running_cluster(num_prefill=1, num_decode=2, engine_args=engine_args) as running:
        yield running


def ask(cluster: Cluster, budget: dict[str, Any], **fields: Any) -> Any:
    return cluster.client().chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1.0, seed=4, n=4, **{"max_tokens": 90, **fields},
        extra_body={"return_token_ids": True, **budget},
    )  # fmt: skip


@pytest.mark.parametrize("budget", BOUNDED, ids=str)
def test_reasoning_ends_with_its_budget_and_the_answer_goes_on(cluster: Cluster, budget: dict[str, Any]) -> None:
    lengths = []
    for choice in ask(cluster, budget, logit_bias=ENDLESS).choices:
        token_ids = choice.token_ids
        lengths.append(token_ids.index(END))
        assert token_ids.count(END) >= 1
        assert len(token_ids) == 90
        assert choice.message.content
    assert max(lengths) == BUDGET
    [first, *_] = ask(cluster, {}, logit_bias={**ENDLESS, str(END): -100}).choices
    assert END not in first.token_ids  # nothing bounds it
    assert not first.message.content


@pytest.mark.parametrize("fields", [{"thinking_token_budget": 0}, {"reasoning_effort": "none"}], ids=str)
def test_no_budget_is_no_reasoning(cluster: Cluster, fields: dict[str, Any]) -> None:
    for choice in ask(cluster, fields).choices:
        assert choice.token_ids[0] == END
        assert not choice.message.reasoning


def test_a_schema_holds_after_a_bounded_reasoning(cluster: Cluster) -> None:
    fields: Any = {"response_format": SCHEMA, "max_tokens": 300, "logit_bias": {"258": -100}}
    for choice in ask(cluster, {"thinking_token_budget": BUDGET}, **fields).choices:
        assert choice.token_ids.index(END) <= BUDGET
        assert json.loads(choice.message.content)["a"] in (1, 2)


async def test_tokens_are_counted_across_a_kill(cluster: Cluster) -> None:
    client = async_client(cluster.url)
    fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "temperature": 1.0, "stream": True}
    extra = {"return_token_ids": True, "thinking_token_budget": 150}

    async def stream(seed: int, ids: set[str], kill: Callable[[], None]) -> list[int]:
        token_ids: list[int] = []
        bias = {**ENDLESS, str(END): -100}
        chunks: Any = await client.chat.completions.create(**fields, seed=seed, logit_bias=bias, extra_body=extra)
        async for chunk in chunks:
            ids.add(chunk.id)
            for choice in chunk.choices:
                token_ids += getattr(choice, "token_ids", None) or ()
            if len(token_ids) > 40:
                kill()
        return token_ids

    async def stream_all(kill: Callable[[], None]) -> tuple[list[list[int]], int]:
        ids: set[str] = set()
        found = await asyncio.gather(*(stream(seed, ids, kill) for seed in range(6)))
        return found, cluster.num_migrations(ids)

    async with client:
        calm = await same_after_a_kill(cluster, stream_all)
    assert [token_ids.index(END) for token_ids in calm] == [150] * 6

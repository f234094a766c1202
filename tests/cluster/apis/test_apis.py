"""Features of requests (APIs, tools, reasoning, chat templates) with features of engines, by real processes.

All APIs give the answer of one plain engine, whatever features compute it; tests/compatibility.toml says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.text.tokenizer import byte_level_alphabet
from engine.pipeline_parallel.remote_stage import TOKEN_VARIABLE
from mini_infer import LLM, SamplingParams
from tests.cluster.wings.test_remote_stage import accepts_connections
from tests.common.tools.tool_templates import HERMES_TEMPLATE
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.quantization.packed_files import FORMATS, SIZES, write
from tests.engine.tiny_models import DEEPSEEK, GPT_OSS, TinyModel
from tests.engine.transformers_models.hf_families import FAMILIES, HfFamily
from tests.harness.adapters import write_adapter
from tests.harness.clients import post
from tests.harness.cluster import (
    Cluster,
    Service,
    free_ports,
    running_cluster,
    save_with_tokenizer,
    service_environment,
)
from tests.harness.waiting import wait_until

NUM_TOKENS = 14
MESSAGES: Any = [{"role": "user", "content": "a question, the same question, and the same question once more"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.0}
ASKED_RESPONSES: dict[str, Any] = {"input": MESSAGES, "temperature": 0.0}
TEMPLATE = HERMES_TEMPLATE + (  # as Qwen3's
    "<think>\n{%- if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{%- endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "look", "description": "Look it up.", "parameters": PARAMETERS}
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FLOAT32: dict[str, Any] = {"dtype": "float32", "quant_mode": "none"}
EIGHT_BITS: dict[str, Any] = {"quant_mode": "int8-weight", "kv_cache_dtype": "fp8"}
BLOCKS = 300
DRAFTS = ("--speculative=suffix", "--no-adaptive-drafts", "--num-speculative-tokens=3")
SWAP = ("--preemption=swap", "--host-tier-gb=0.01", "--itl-objective-ms=1000")
WHOLE_EXPERTS = ("--tp=2", "--expert-parallel", "--expert-exchange=dispatch", "--num-redundant-experts=2")
COMMON = {"vocab_size": 320, "max_position_embeddings": 2048, "num_hidden_layers": 2}
WIDE = {**SIZES, **COMMON}
WINDOWS = TinyModel("GptOss", {**GPT_OSS, **COMMON})
GEMMA2 = FAMILIES["gemma2"]


@dataclass(frozen=True)
class Kind:
    """tiny: the model that `save` writes. numbers: settings that change an answer's tokens.

    flags: of all workers. decode: of decode workers.
    """

    tiny: TinyModel | HfFamily
    numbers: dict[str, Any]
    flags: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    save: Callable[[TinyModel | HfFamily, Path], Path] = save_with_tokenizer
    has_adapter: bool = False
    has_stage: bool = False  # of its own, at a port
    is_exact: bool = True  # experts that move change the order of sums, which 8-bit KV may turn into other tokens


def save_packed(tiny: Any, folder: Path) -> Path:
    write(FORMATS["gptq"], folder, tiny)
    return folder


def save_gguf(tiny: Any, folder: Path) -> Path:
    """Write a GGUF file with its tokenizer inside, as such files are published."""
    folder.mkdir()
    tokens = [*sorted(byte_level_alphabet()), *MARKERS, "<|end|>", "10", *map(str, range(1000, 1058))]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [4] * len(MARKERS) + [3, 1] + [5] * 58,
        "tokenizer.ggml.merges": ["1 0"], "tokenizer.ggml.eos_token_id": 260,
    }  # fmt: skip
    write_gguf(folder / "tiny.gguf", tiny.build(), "llama", "Q8_0", tokenizer=tokenizer)
    return folder / "tiny.gguf"


KINDS = {
    "placed experts": Kind(
        WINDOWS, FLOAT32, (*DRAFTS, *SWAP),
        (*WHOLE_EXPERTS, "--expert-placement={folder}/loads.json"),
    ),
    "moving experts": Kind(
        WINDOWS, EIGHT_BITS, (*DRAFTS, *SWAP),
        (*WHOLE_EXPERTS, "--expert-rebalance-interval=10", "--expert-load-file={folder}/counts.json"), is_exact=False,
    ),
    "stages": Kind(
        TinyModel("DeepseekV3", {**DEEPSEEK, **COMMON, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}), FLOAT32,
        DRAFTS, ("--pp=2",),
    ),
    "a stage elsewhere": Kind(
        WINDOWS, EIGHT_BITS, SWAP[:2],
        ("--pp=2", "--stage-address=127.0.0.1:{port}"), has_stage=True,
    ),
    "packed": Kind(
        TinyModel("Llama", WIDE), EIGHT_BITS, save=save_packed
    ),
    "gguf": Kind(TinyModel("Llama", WIDE), {"enable_lora": True}, save=save_gguf, has_adapter=True),
    "foreign": Kind(
        replace(GEMMA2, changes={**GEMMA2.changes, **COMMON}), {**FLOAT32, "model_impl": "transformers"}
    ),
    "rejection": Kind(
        WINDOWS, EIGHT_BITS, ("--speculative=draft:{model}", "--speculative-sampling=rejection", *SWAP)
    ),
}  # fmt: skip


@contextmanager
def stage(port: int, folder: Path) -> Iterator[None]:
    """Run the first stage of a worker, as another host would. 0: none."""
    if not port:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, "a secret")
        service = Service("stage", ["worker.ranks.stage", f"--port={port}"], folder / "stage.log")
        service.start(service_environment())
        try:
            wait_until(lambda: accepts_connections(port), message=service.log)
            yield
        finally:
            service.kill()


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    model: str
    expected: str  # of a plain engine
    is_exact: bool
    transport: str | None  # of the prompt's KV

    def check(self, text: str) -> None:
        """Check that the answer is a plain engine's, or as long as that if numbers may differ."""
        if self.is_exact:
            assert text == self.expected.strip()
        assert len(text) > 3


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("models")
    path = kind.save(kind.tiny, folder / "tiny")
    if path.is_dir():
        backend: tokenizers.Tokenizer = load_tokenizer(resolve_model("dry-run"))._backend
        backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in MARKERS])
        (path / "tokenizer.json").write_text(backend.to_str())
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": backend.id_to_token(258)}))
    (folder / "think.jinja").write_text(TEMPLATE)
    (folder / "loads.json").write_text(json.dumps({"num_experts": 6, "layers": [[90, 1, 40, 5, 5, 9]] * 2}))
    common = [f"--model={path}", f"--num-gpu-blocks={BLOCKS}", "--num-threads=1"]
    for name, value in kind.numbers.items():
        flag = f"--{name.replace('_', '-')}"
        common.append(flag if value is True else f"{flag}={value}")
    adapter, modules = "", []
    if kind.has_adapter:
        shapes = {name: tuple(weight.shape) for name, weight in kind.tiny.build().named_parameters()}
        adapter = str(write_adapter(folder / "poet", shapes))
        modules = [f"--lora-modules=poet={adapter}"]
    [port] = free_ports(1)
    named = {"folder": folder, "model": path, "port": port}
    flags, decode = ([flag.format(**named) for flag in given] for given in (kind.flags, kind.decode))
    with stage(port if kind.has_stage else 0, folder), running_cluster(
        engine_args=(*common, *modules), worker_args=flags, role_args={"decode": decode},
        router_args=(f"--chat-template={folder / 'think.jinja'}", "--local-prefill-tokens=0", *modules),
    ) as cluster:  # fmt: skip
        prompt = post(f"{cluster.url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        llm = LLM(str(path), num_gpu_blocks=BLOCKS, num_threads=1, **kind.numbers)
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        [answer] = llm.generate([prompt], params, adapter=adapter)
        transport = None if kind.has_stage else "shm"
        yield Served(cluster, "poet" if adapter else "tiny", answer.text, kind.is_exact, transport)


def ask(served: Served, path: str, **fields: Any) -> Any:
    body = {"model": served.model, **fields}
    answer = post(f"{served.cluster.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_all(served: Served, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """Ask all at once: in as many steps as the longest answer takes."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return [*pool.map(lambda each: ask(served, each[0], **each[1]), asked)]


def test_all_apis_reason_as_a_plain_engine_does(served: Served) -> None:
    """A template opens the reasoning, which a random model never closes."""
    chat = ask(served, "chat/completions", **ASKED, max_tokens=NUM_TOKENS)
    served.check(chat["choices"][0]["message"]["reasoning"])
    assert served.cluster.legs_of(chat["id"])[-1]["transport"] == served.transport
    responses, messages = ask_all(
        served,
        ("responses", {**ASKED_RESPONSES, "max_output_tokens": NUM_TOKENS}),
        ("messages", {**ASKED, "max_tokens": NUM_TOKENS}),
    )
    served.check(responses["output"][0]["content"][0]["text"])
    served.check(messages["content"][0]["thinking"])


def test_all_apis_call_a_tool(served: Served) -> None:
    """All call the same tool: a grammar is followed after omitted and after bounded reasoning."""
    most, tools = 160, [{"type": "function", "function": FUNCTION}]
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    fields = {**ASKED, "max_tokens": most, "tools": tools, **one}
    in_responses = {
        **ASKED_RESPONSES, "max_output_tokens": most, "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "none"}, **one,
    }  # fmt: skip
    in_messages = {
        **ASKED, "max_tokens": most, "thinking": {"type": "disabled"},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "tools": [{"name": "look", "description": "Look it up.", "input_schema": PARAMETERS}],
    }  # fmt: skip
    chat, responses, messages, bounded = ask_all(
        served,
        ("chat/completions", {**fields, "reasoning_effort": "none"}),
        ("responses", in_responses),
        ("messages", in_messages),
        ("chat/completions", {**fields, "thinking_token_budget": 6}),
    )
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
    called = chat["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (called["name"], json.loads(called["arguments"])["a"] in (1, 2)) == ("look", True)
    call = next(item for item in responses["output"] if item["type"] == "function_call")
    wanted = ({"a": 1}, {"a": 2}) if not served.is_exact else (json.loads(called["arguments"]),)
    assert (call["name"], json.loads(call["arguments"]) in wanted) == ("look", True)
    used = next(block for block in messages["content"] if block["type"] == "tool_use")
    assert used["input"] in wanted
    message = bounded["choices"][0]["message"]
    assert message["reasoning"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["a"] in (1, 2)


def test_all_at_once_with_vectors_and_log_probabilities(served: Served) -> None:
    call = {
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
        "thinking_token_budget": 6, "parallel_tool_calls": False, "max_tokens": 160,
    }  # fmt: skip
    chat, responses, messages, embeddings, completion = ask_all(
        served,
        ("chat/completions", {**ASKED, **call}),
        ("responses", {**ASKED_RESPONSES, "max_output_tokens": NUM_TOKENS}),
        ("messages", {**ASKED, "max_tokens": NUM_TOKENS}),
        ("embeddings", {"input": "Hello"}),
        ("completions", {"prompt": "Hello", "max_tokens": 1, "echo": True, "logprobs": 1}),
    )
    message = chat["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["a"] in (1, 2)
    served.check(responses["output"][0]["content"][0]["text"])
    served.check(messages["content"][0]["thinking"])
    [vector] = embeddings["data"]
    assert sum(number**2 for number in vector["embedding"]) == pytest.approx(1.0, abs=1e-3)
    assert len(completion["choices"][0]["logprobs"]["tokens"]) == 6


def test_simulated_steps(tmp_path: Path) -> None:
    """They follow no grammars, so a request that requires a call fails."""
    (tmp_path / "think.jinja").write_text(TEMPLATE)
    flags = ("--model=dry-run", f"--num-gpu-blocks={BLOCKS}", "--num-threads=1", "--simulated-steps=base=0.001")
    with running_cluster(
        engine_args=flags, router_args=(f"--chat-template={tmp_path / 'think.jinja'}", "--local-prefill-tokens=0")
    ) as cluster:
        served = Served(cluster, "dry-run", "", False, "shm")
        tools = [{"type": "function", "function": FUNCTION}]
        for fields in ({}, {"tools": tools}):  # which the prompt shows
            chat = ask(served, "chat/completions", messages=MESSAGES, max_tokens=NUM_TOKENS, **fields)
            assert len(chat["choices"][0]["message"]["reasoning"]) > 3
        responses = ask(served, "responses", input=MESSAGES, max_output_tokens=NUM_TOKENS)
        messages = ask(served, "messages", messages=MESSAGES, max_tokens=NUM_TOKENS)
        assert len(responses["output"][0]["content"][0]["text"]) > 3
        assert len(messages["content"][0]["thinking"]) > 3
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
        assert "simulated steps have neither" in post(f"{cluster.url}/v1/chat/completions", json=body).text

"""An engine with its tokenizer, without services: prompts to token ids, outputs to text.

What `LLM` and `AsyncLLM` have in common. It does not know who steps the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from common.config import setting_names
from common.errors import ConfigError, InvalidRequestError
from common.text.tokenizer import Tokenizer, load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.config import GpuConfig
from engine.mailboxes import TokensAndParams
from engine.request import Request, RequestId, RequestOutput, SamplingParams, TokenLogprobs
from engine.start_progress import terminal_progress

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

Prompt = str | Sequence[int]  # text, or token ids as they are
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


@dataclass(slots=True)
class Completion:
    """One finished answer. `text` is without special tokens.

    token_ids: everything generated, the token that ended it included.
    finish_reason: "stop" (end of sequence or a stop token) or "length" (`max_tokens` or the context is full).
    num_cached_tokens: how many of the prompt's tokens came from the prefix cache.
    logprobs: one entry per generated token if asked for; prompt_logprobs: one per prompt token but the first.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """Conversion of prompts to engine requests, and of the engine's tokens back to text."""

    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig

    @classmethod
    def load(cls, model: str, settings: Mapping[str, Any]) -> OfflineModel:
        """settings: those of `EngineConfig` and `GpuConfig`. Raises ConfigError with what to do."""
        names = setting_names(EngineConfig, GpuConfig)
        chosen: dict[type[Any], dict[str, Any]] = {EngineConfig: {"model": model}, GpuConfig: {}}
        for name, value in settings.items():
            if name not in names:
                near = get_close_matches(name, names, 1)
                raise ConfigError(f"no setting {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
            cls_of, field_name = names[name]
            chosen[cls_of][field_name] = value
        config, gpu = EngineConfig(**chosen[EngineConfig]), GpuConfig(**chosen[GpuConfig])
        with terminal_progress() as on_progress:
            parts = assemble(config, gpu=gpu, is_offline=True, on_progress=on_progress)
        return cls(parts.engine, load_tokenizer(parts.files), parts.model_config)

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[TokensAndParams]:
        """Token ids and parameters of each prompt. Raises InvalidRequestError when their numbers differ."""
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        if params is None or isinstance(params, SamplingParams):
            return [(token_ids, params or SamplingParams()) for token_ids in encoded]
        if len(params) != len(encoded):
            raise InvalidRequestError(f"{len(encoded)} prompts but {len(params)} sampling parameters", "params")
        return list(zip(encoded, params, strict=True))

    def encode_chat(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None) -> list[int]:
        """Token ids of a conversation in the model's own template. Raises InvalidRequestError when it has none."""
        return self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, variables=template_kwargs
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)


class Answers:
    """The outputs of one `generate` call, until every prompt is answered."""

    def __init__(self, num_prompts: int) -> None:
        self.num_open = num_prompts
        self._outputs: dict[RequestId, list[RequestOutput]] = {}

    def add(self, output: RequestOutput) -> None:
        self._outputs.setdefault(output.request.request_id, []).append(output)
        self.num_open -= output.finish_reason is not None

    def completions(self, requests: Sequence[Request], tokenizer: Tokenizer) -> list[Completion]:
        """Completions in the order of `requests`, all of which have ended."""
        return [_completion(request, self._outputs[request.request_id], tokenizer) for request in requests]


class TextStream:
    """The text of one request as its outputs come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.has_ended = False
        self._detokenizer = tokenizer.detokenizer()

    def push(self, output: RequestOutput) -> str:
        """Text that is certain now; empty while a character is incomplete."""
        self.has_ended = output.finish_reason is not None
        text = self._detokenizer.push(_visible(output.new_token_ids, output.stop_token_id))
        return text + self._detokenizer.finish() if self.has_ended else text


def _completion(request: Request, outputs: Sequence[RequestOutput], tokenizer: Tokenizer) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    token_ids = request.output_token_ids
    return Completion(
        prompt_token_ids=request.prompt_token_ids,
        text=tokenizer.decode(_visible(token_ids, last.stop_token_id)),
        token_ids=token_ids,
        finish_reason=last.finish_reason.value,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=[entry for output in outputs for entry in output.logprobs],
        prompt_logprobs=[entry for output in outputs for entry in output.prompt_logprobs],
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _visible(token_ids: Sequence[int], stop_token_id: int | None) -> Sequence[int]:
    """Drop the token that ended the request."""
    return token_ids[:-1] if stop_token_id is not None and token_ids else token_ids

"""An engine with its tokenizer, without services: prompts to token ids, outputs to text.

What `LLM` and `AsyncLLM` have in common. It does not know who steps the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, InvalidRequestError
from common.grammar.grammar import check_grammar
from common.text.chat_template import TemplateUse
from common.text.stop_strings import StopStringMatcher
from common.text.tokenizer import Tokenizer
from common.wings import require_wing
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.engine import Engine
from engine.offline.arguments import (
    Message,
    Prompt,
    checked_setting,
    message_list,
    params_list,
    prompt_list,
    stop_strings,
)
from engine.offline.mailboxes import TokensAndParams
from engine.offline.progress import terminal_progress
from engine.request import Request, RequestId, RequestOutput, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.models.config import ModelConfig


@dataclass(slots=True)
class Completion:
    """One finished answer. `text` is without special tokens, and without the stop string that ended it.

    token_ids: everything generated, the token that ended it included.
    finish_reason: "stop" (end of sequence, a stop token or stop string) or "length" (`max_tokens` or the context is
        full). stop_reason: that stop string.
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
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """Conversion of prompts to engine requests, and of the engine's tokens back to text."""

    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig

    @classmethod
    def load(cls, model: str, settings: Mapping[str, Any]) -> OfflineModel:
        """settings: those of `EngineConfig` and `GpuConfig`. Raises ConfigError with what to do."""
        names = _setting_names(EngineConfig, GpuConfig)
        chosen: dict[type[Any], dict[str, Any]] = {EngineConfig: {}, GpuConfig: {}}
        for name, value in {"model": model, **settings}.items():
            if name not in names:
                near = get_close_matches(name, names, 1)
                raise ConfigError(f"no setting {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
            cls_of, declared = names[name]
            chosen[cls_of][declared.name] = checked_setting(name, value, declared)
        config, gpu = EngineConfig(**chosen[EngineConfig]), GpuConfig(**chosen[GpuConfig])
        with terminal_progress() as on_progress:
            parts = assemble(config, gpu=gpu, is_offline=True, on_progress=on_progress)
        return cls(parts.engine, parts.use_tokenizer(), parts.loaded.config)

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str = "",
    ) -> list[TokensAndParams]:  # fmt: skip
        """Token ids and parameters of each prompt. Raises InvalidRequestError: numbers differ, a bad grammar, no
        adapter in that folder."""
        encoded = [self._encode(prompt) for prompt in prompt_list(prompts)]
        chosen = params_list(params, len(encoded))
        for grammar in {each.grammar for each in chosen if each.grammar}:
            check_grammar(grammar)
        name = _reference(adapter) if adapter else ""
        return [(token_ids, each, name) for token_ids, each in zip(encoded, chosen, strict=True)]

    def encode_chat(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None) -> list[int]:
        """Token ids of a conversation in the model's own template. Raises InvalidRequestError when it has none."""
        return self.tokenizer.apply_chat_template(
            message_list(messages), use=TemplateUse(variables=template_kwargs or {})
        )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            # All of it is the caller's, who may have rendered a chat template.
            return self.tokenizer.encode(prompt, add_special_tokens=True, allow_special=True)
        except TypeError:
            raise InvalidRequestError("the prompt has half of a surrogate pair, which is no text", "prompt") from None


def _reference(folder: str) -> str:
    """What requests call the adapter in that folder. Raises InvalidRequestError."""
    require_wing("common.lora", "adapter")
    from common.lora.adapter_ref import AdapterRef
    from common.lora.modules import folder_of

    try:
        return str(AdapterRef.of(folder_of(folder)))
    except ConfigError as error:
        raise InvalidRequestError(str(error), "adapter") from None


class TextStream:
    """The text of one request as its outputs come, until it ends or holds a stop string.

    continues: it continues the prompt's text, so a space before its first word is its own.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], continues: bool) -> None:
        self.has_ended = False
        self.num_tokens = 0
        self._detokenizer = tokenizer.detokenizer(continues=continues)
        self._matcher = StopStringMatcher(stops) if stops else None

    @property
    def stop_string(self) -> str | None:
        """The one that ended it."""
        return None if self._matcher is None else self._matcher.match

    def push(self, output: RequestOutput) -> str:
        """Text that is certain now; empty while a character is incomplete, or what may become a stop string."""
        self.has_ended = output.finish_reason is not None
        visible = _visible(output.new_token_ids, output.stop_token_id)
        if self._matcher is not None:
            return self._push_matching(self._matcher, visible, output.request.params.min_tokens)
        text = self._detokenizer.push(visible)
        return text + self._detokenizer.finish() if self.has_ended else text

    def _push_matching(self, matcher: StopStringMatcher, token_ids: Sequence[int], min_tokens: int) -> str:
        """Push token by token: those after the one that completes a stop string are dropped."""
        pieces: list[str] = []
        for token_id in token_ids:
            text = self._detokenizer.push((token_id,))
            self.num_tokens += 1
            pieces.append(matcher.skip(text) if self.num_tokens <= min_tokens else matcher.push(text))
            if matcher.match is not None:
                self.has_ended = True
                return "".join(pieces)
        if self.has_ended:
            pieces += matcher.push(self._detokenizer.finish()), matcher.flush()
        return "".join(pieces)


class Answers:
    """The outputs of one `generate` or `chat` call, until every prompt is answered. continues: as in `TextStream`."""

    def __init__(self, num_prompts: int, tokenizer: Tokenizer, stop: str | Sequence[str], continues: bool) -> None:
        """Raise InvalidRequestError for stop strings that cannot work."""
        self.num_open = num_prompts
        self._tokenizer = tokenizer
        self._stops = stop_strings(stop)
        self._continues = continues
        self._answers: dict[RequestId, _Answer] = {}

    def add(self, output: RequestOutput) -> bool:
        """Take an output; whether its request is answered before the engine knows, so that it is to be aborted."""
        answer = self._answers.setdefault(
            output.request.request_id, _Answer(self._tokenizer, self._stops, self._continues)
        )
        if answer.has_ended:
            return False  # sampled before the request was aborted
        answer.add(output)
        self.num_open -= answer.has_ended
        return answer.has_ended and output.finish_reason is None

    def completions(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of `requests`, all of which are answered."""
        return [self._answers[request.request_id].completion(request) for request in requests]


class _Answer:
    """One prompt's outputs so far. Without stop strings its text is made at the end, of all tokens at once."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], continues: bool) -> None:
        self.has_ended = False
        self._tokenizer, self._continues = tokenizer, continues
        self._stream = TextStream(tokenizer, stops, continues) if stops else None
        self._pieces: list[str] = []
        self._outputs: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self.has_ended = output.finish_reason is not None
        if self._stream is not None:
            self._pieces.append(self._stream.push(output))
            self.has_ended = self._stream.has_ended

    def completion(self, request: Request) -> Completion:
        last, stream = self._outputs[-1], self._stream
        token_ids = [token_id for output in self._outputs for token_id in output.new_token_ids]
        logprobs = [entry for output in self._outputs for entry in output.logprobs]
        if not stream:
            detokenizer = self._tokenizer.detokenizer(continues=self._continues)
            self._pieces += detokenizer.push(_visible(token_ids, last.stop_token_id)), detokenizer.finish()
        stop_string = stream.stop_string if stream else None
        if stream and stop_string:
            del token_ids[stream.num_tokens :], logprobs[stream.num_tokens :]
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            text="".join(self._pieces),
            token_ids=token_ids,
            finish_reason="stop" if stop_string or last.finish_reason is None else last.finish_reason.value,
            num_cached_tokens=request.num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=[entry for output in self._outputs for entry in output.prompt_logprobs],
            stop_reason=stop_string,
        )


def _visible(token_ids: Sequence[int], stop_token_id: int | None) -> Sequence[int]:
    """Drop the token that ended the request."""
    return token_ids[:-1] if stop_token_id is not None and token_ids else token_ids


def _setting_names(*classes: type[Any]) -> dict[str, tuple[type[Any], Field[Any]]]:
    """Every name of a setting, as Python spells it -> (class, field): the field's own and its further flags."""
    return {
        flag.removeprefix("--").replace("-", "_"): (cls, each)
        for cls in classes
        for each in fields(cls)
        for flag in (each.name, *each.metadata.get("flags", ()))
    }

"""The in-process Python API: one engine, no services.

from engine import LLM, SamplingParams
LLM().generate(["The capital of France is"], SamplingParams(max_tokens=8))
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import EngineError, InvalidRequestError
from common.text.tokenizer import Tokenizer, load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from engine.request import Request, RequestOutput, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """One finished answer. `text` is without special tokens."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class LLM:
    """A model that answers. Keyword arguments are fields of `EngineConfig` and `GpuConfig`. Raises ConfigError."""

    def __init__(self, model: str = "", **settings: Any) -> None:
        of_gpu = {name: settings.pop(name) for name in GpuConfig.__dataclass_fields__ if name in settings}
        parts = assemble(EngineConfig(model=model, **settings), gpu=GpuConfig(**of_gpu), is_offline=True)
        self.engine = parts.engine
        self.model_config = parts.model_config
        self.tokenizer: Tokenizer = load_tokenizer(parts.files)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete all prompts, batched; results in the order of the prompts.

        Raises InvalidRequestError for a prompt that cannot work (none is started then), EngineError when one fails.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        chosen = [params] * len(encoded) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(chosen) != len(encoded):
            raise InvalidRequestError(f"{len(encoded)} prompts but {len(chosen)} sampling parameters", "params")
        requests: list[Request] = []
        try:
            for token_ids, param in zip(encoded, chosen, strict=True):
                requests.append(self.engine.add_request(token_ids, param or SamplingParams()))
            outputs = self._run(requests)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [self._completion(request, outputs[request.request_id]) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str]:
        """Yield the text of one completion as it is generated; closing the iterator stops the generation."""
        request = self.engine.add_request(self._encode(prompt), params or SamplingParams())
        detokenizer = self.tokenizer.detokenizer()
        try:
            while True:
                for output in self.engine.step():
                    if output.request is not request:
                        continue
                    if output.error is not None:
                        raise EngineError(output.error)
                    ended = output.finish_reason is not None
                    token_ids = _visible(output.new_token_ids, output.stop_token_id)
                    text = detokenizer.push(token_ids) + (detokenizer.finish() if ended else "")
                    if text:
                        yield text
                    if ended:
                        return
        finally:
            self.engine.abort(request.request_id)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation in the model's own chat template."""
        prompt = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return self.generate([prompt], params)[0]

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)

    def _run(self, requests: Sequence[Request]) -> dict[str, list[RequestOutput]]:
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        num_open = len(requests)
        while num_open:
            for output in self.engine.step():
                if output.request.request_id not in outputs:
                    continue
                if output.error is not None:
                    raise EngineError(output.error)
                outputs[output.request.request_id].append(output)
                num_open -= output.finish_reason is not None
        return outputs

    def _completion(self, request: Request, outputs: Sequence[RequestOutput]) -> Completion:
        last = outputs[-1]
        assert last.finish_reason is not None
        token_ids = request.output_token_ids
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            text=self.tokenizer.decode(_visible(token_ids, last.stop_token_id)),
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
    """Without the token that ended the request."""
    return token_ids[:-1] if stop_token_id is not None and token_ids else token_ids

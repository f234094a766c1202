"""Validate the fields of a request body, and say in a client's words what is wrong with them.

A field is honoured, listed as harmless, or refused with a message that names it; none is ignored silently.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from common.errors import InvalidRequestError
from router.api.message_schemas import Body, Message

B = TypeVar("B", bound=Body)

# Fields of the API that this server knows and does not support; a value that asks for nothing is fine.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"), (None,)),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    **dict.fromkeys(("audio", "web_search_options", "verbosity"), (None,)),
    # Of chat completions alone.
    "parallel_tool_calls": (None, True, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "chat_template_kwargs": (None, {}),
    # vLLM's own.
    **dict.fromkeys(("prompt_logprobs", "kv_transfer_params"), (None,)),
    **dict.fromkeys(("documents", "logits_processors"), (None, [])),
    **dict.fromkeys(("spaces_between_special_tokens", "include_reasoning"), (None, True)),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "mm_processor_kwargs": (None, {}),
    **dict.fromkeys(("prompt_embeds", "request_id"), (None,)),
    **dict.fromkeys(("add_special_tokens", "echo", "watermarking"), (None, False)),
    **dict.fromkeys(("ec_transfer_params", "logprob_token_ids", "repetition_detection"), (None,)),
    "routed_experts_prompt_start": (None, 0),
    "media_io_kwargs": (None, {}),
    "padding": (None, "do_not_pad"),
    "thinking_token_budget": (None, -1),
    "use_activation": (None, True),
    "best_of": (None, 1),
    "vllm_xargs": (None, {}),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    # Of responses, also fields that chat completions have.
    **dict.fromkeys(("access_programs", "conversation", "image", "max_tool_calls", "moderation", "prompt"), (None,)),
    **dict.fromkeys(("context_management", "stop"), (None, [])),
    **dict.fromkeys(("enable_response_messages", "include_stop_str_in_output"), (None, False)),
    **dict.fromkeys(("priority", "top_logprobs"), (None, 0)),
    **dict.fromkeys(("cache_salt", "previous_response", "seed"), (None,)),
    "ignore_eos": (None, False),
    "skip_special_tokens": (None, True),
    "logit_bias": (None, {}),
    "previous_input_messages": (None, []),
    "repetition_penalty": (None, 1.0),
    "top_k": (None, 0, -1),
}
# Descriptions of functions ask for nothing once the client forbids to call them.
_FORBIDDEN_BY = {"tools": "tool_choice", "functions": "function_call"}
# Fields that change nothing here: labels, hints, and defaults that some clients always send.
_IGNORED = frozenset(
    {
        "metadata", "prediction", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        # vLLM's: how many tokens a chunk has; what answers of its routes for rendering have.
        "stream_interval", "return_token_offsets", "return_mm_kwargs",
    }
)  # fmt: skip


def is_ignored(kind: type[Body], name: str) -> bool:
    """Whether a field changes nothing in bodies of a kind. The answer's `x-mini-infer-ignored` names it."""
    return name in (kind.no_effect if name in kind.model_fields else _IGNORED)


def harmless_values(kind: type[Body], name: str) -> tuple[Any, ...] | None:
    """The values of a field that is not supported which ask for nothing; None: it is supported, or unknown."""
    return None if name in kind.model_fields else _NOT_SUPPORTED.get(name)


def accepted_besides(kind: type[BaseModel]) -> dict[str, tuple[Any, ...] | None]:
    """Fields that bodies of a kind may have besides its own, to no effect: the values of each; None: any value."""
    known = dict.fromkeys(sorted(_IGNORED)) | _NOT_SUPPORTED
    return {name: values for name, values in known.items() if name not in kind.model_fields}


def parse_body(kind: type[B], fields: dict[str, Any]) -> B:
    """Validate `fields`. Raises InvalidRequestError that names the field."""
    kept = {}
    for name, value in fields.items():
        if name in _IGNORED and name not in kind.model_fields:
            continue
        harmless = harmless_values(kind, name)
        if harmless is not None:
            if fields.get(_FORBIDDEN_BY.get(name, "")) == "none":
                continue
            if value not in harmless:
                message = f"{name} is not supported by this server yet"
                raise InvalidRequestError(message, name, "unsupported_parameter")
            continue
        kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _first_error(kind, error) from None


def _first_error(kind: type[Body], error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    loc = first["loc"]
    if rule := _rule_of_union(kind, loc, first["type"]):
        return rule
    param = ".".join(str(part) for part in loc) or None
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"unknown field {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required", param, "missing_required_parameter")
    if first["type"] == "model_type":  # pydantic's own text names our classes
        return InvalidRequestError(f"{param} must be an object", param)
    return InvalidRequestError(f"{param or 'body'}: {first['msg']}", param)


def _rule_of_union(kind: type[Body], loc: tuple[int | str, ...], error_type: str) -> InvalidRequestError | None:
    """Pydantic says of each alternative why it was not meant; what may be sent at all is what helps. A field that
    needs this has a description."""
    is_content = loc[:1] == ("messages",) and loc[2:3] == ("content",)
    model, path = (Message, loc[:3]) if is_content else (kind, loc[:1])
    field = model.model_fields.get(str(path[-1])) if path else None
    if field is None or field.description is None or (error_type == "missing" and loc == path):
        return None
    param = ".".join(str(part) for part in path)
    return InvalidRequestError(f"{param} must be {field.description}", param)

"""Fields that requests to OpenAI and to vLLM may have and this server does not: which values of them ask for nothing.

Knows no body: callers say which fields a body has itself.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from common.errors import InvalidRequestError

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


def is_ignored(own: Container[str], no_effect: Container[str], name: str) -> bool:
    """Whether a field changes nothing. The answer's `x-mini-infer-ignored` names it.

    own: the body's fields. no_effect: those of them that are checked, and change nothing.
    """
    return name in (no_effect if name in own else _IGNORED)


def harmless_values(own: Container[str], name: str) -> tuple[Any, ...] | None:
    """The values of a field that is not supported which ask for nothing; None: it is supported, or unknown."""
    return None if name in own else _NOT_SUPPORTED.get(name)


def accepted_besides(own: Container[str]) -> dict[str, tuple[Any, ...] | None]:
    """Fields that a body may have besides its own, to no effect: the values of each; None: any value."""
    known = dict.fromkeys(sorted(_IGNORED)) | _NOT_SUPPORTED
    return {name: values for name, values in known.items() if name not in own}


def own_fields(own: Container[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the fields that ask for nothing. Raises InvalidRequestError for those that ask for something."""
    kept = {}
    for name, value in fields.items():
        if name in _IGNORED and name not in own:
            continue
        harmless = harmless_values(own, name)
        if harmless is None:
            kept[name] = value
        elif fields.get(_FORBIDDEN_BY.get(name, "")) != "none" and value not in harmless:
            raise InvalidRequestError(f"{name} is not supported by this server yet", name, "unsupported_parameter")
    return kept

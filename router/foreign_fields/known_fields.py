"""Fields of OpenAI's and vLLM's requests that this server does not have, and the values of them that ask for nothing.

Knows no body: callers pass the body's own fields.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from common.errors import InvalidRequestError

# Fields of the API that are known but not supported; values that ask for nothing are accepted.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"), (None,)),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    **dict.fromkeys(("audio", "web_search_options", "verbosity"), (None,)),
    # Only of chat completions.
    "parallel_tool_calls": (None, True, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "chat_template_kwargs": (None, {}),
    # Only of vLLM.
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
    # Of responses, including fields that chat completions have.
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
# Tools and functions have no effect once the client forbids calls.
_FORBIDDEN_BY = {"tools": "tool_choice", "functions": "function_call"}
# Fields without effect: labels, hints, and defaults that some clients always send.
_IGNORED = frozenset(
    {
        "metadata", "prediction", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "client_metadata",
        # vLLM's: the number of tokens in a chunk; contents of answers from its rendering routes.
        "stream_interval", "return_token_offsets", "return_mm_kwargs",
    }
)  # fmt: skip


def is_ignored(own: Container[str], no_effect: Container[str], name: str) -> bool:
    """Whether a field has no effect. The answer's `x-mini-infer-ignored` names it.

    own: the body's fields. no_effect: those of them that are checked but have no effect.
    """
    return name in (no_effect if name in own else _IGNORED)


def harmless_values(own: Container[str], name: str) -> tuple[Any, ...] | None:
    """Return the values of an unsupported field that ask for nothing; None: the field is supported or unknown."""
    return None if name in own else _NOT_SUPPORTED.get(name)


def accepted_besides(own: Container[str]) -> dict[str, tuple[Any, ...] | None]:
    """Return fields without effect that a body may have besides its own, with their values; None: any value."""
    known = dict.fromkeys(sorted(_IGNORED)) | _NOT_SUPPORTED
    return {name: values for name, values in known.items() if name not in own}


def own_fields(own: Container[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the fields that ask for nothing. Raises InvalidRequestError for unsupported fields that do not."""
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

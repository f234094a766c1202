"""docs/request_fields.md: what becomes of each field of OpenAI's and vLLM's requests.

python -m tests.request_fields > docs/request_fields.md

OpenAI's fields come from the installed client, vLLM's from the lists here, what this server does from its own tables.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable

from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from router.api.schemas import Body
from router.completions_api.bodies import COMPLETION_BODY
from router.embeddings_api.schemas import EmbeddingBody, RerankBody, ScoreBody
from router.features import CHAT_BODY
from router.foreign_fields.known_fields import harmless_values, is_ignored
from router.responses_api.schemas import ResponsesBody

# Of vLLM's vllm/entrypoints: openai/chat_completion, openai/completion and openai/responses, pooling/base and
# pooling/scoring, each protocol.py, as of November 2026; and fields of earlier releases.
_BOTH = """add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids min_p min_tokens
priority prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking"""
_POOLING = """cache_salt mm_processor_kwargs padding priority request_id truncate_prompt_tokens truncation_side
use_activation user"""
VLLM: dict[str, str] = {
    "chat": f"""{_BOTH} add_generation_prompt best_of chat_template chat_template_kwargs continue_final_message
        documents echo include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text""",
    "completions": f"{_BOTH} prompt_embeds",
    "embeddings": f"""{_POOLING} add_generation_prompt add_special_tokens chat_template chat_template_kwargs
        continue_final_message embed_dtype endianness media_io_kwargs messages normalize""",
    "rerank": f"{_POOLING} documents model query top_n",
    "responses": """cache_salt enable_response_messages ignore_eos include_stop_str_in_output logit_bias
        mm_processor_kwargs previous_input_messages previous_response priority repetition_penalty request_id seed
        skip_special_tokens stop structured_outputs top_k vllm_xargs""",
    "score": f"{_POOLING} data_1 data_2 documents items model queries text_1 text_2",
}
OPENAI: dict[str, typing.Any] = {
    "chat": chat_create_params.CompletionCreateParamsNonStreaming,
    "completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
    "responses": response_create_params.ResponseCreateParamsNonStreaming,
}  # rerank and score are not OpenAI's
BODIES: dict[str, type[Body]] = {
    "chat": CHAT_BODY,
    "completions": COMPLETION_BODY,
    "embeddings": EmbeddingBody,
    "rerank": RerankBody,
    "responses": ResponsesBody,
    "score": ScoreBody,
}
PATHS = {api: "chat/completions" if api == "chat" else api for api in BODIES}
WORKS, IGNORED, REFUSED, UNKNOWN = "works", "no effect", "refused", "unknown"
_HEAD = f"""# Fields of requests

What becomes of each field of OpenAI's and vLLM's requests. `python -m tests.request_fields` writes this page.

- **{WORKS}**: honoured; a value that cannot be honoured is refused with 400, which names the field. Where only one
  value is accepted, it is given.
- **{IGNORED}**: accepted. The answer's header `x-mini-infer-ignored` names it, and advice that this model does not
  heed: `reasoning_effort`, `verbosity`, variables that its template does not read, `strict` without a grammar.
- **{REFUSED}**: 400, "FIELD is not supported by this server yet", code `unsupported_parameter`. Null and the values
  given ask for nothing, and are accepted.
- **{UNKNOWN}**, as are fields that are not in the table: 400, "unknown field FIELD", code `unknown_parameter`.

"""


def fields_of(api: str) -> set[str]:
    """All fields of one API's requests: OpenAI's, vLLM's, and this server's own."""
    of_openai = typing.get_type_hints(OPENAI[api]) if api in OPENAI else ()
    return {*of_openai, *VLLM[api].split(), *BODIES[api].model_fields}


def verdict(api: str, name: str) -> str:
    kind = BODIES[api]
    if is_ignored(kind.model_fields, kind.no_effect, name):
        return IGNORED
    if name in kind.model_fields:
        return WORKS
    return UNKNOWN if harmless_values(kind.model_fields, name) is None else REFUSED


def _cell(api: str, name: str) -> str:
    if name not in fields_of(api):
        return ""
    found, kind = verdict(api, name), BODIES[api]
    if found == WORKS and (value := _only_value(kind, name)) is not None:
        return f"{found}, only `{value!r}`"
    if found != REFUSED:
        return found
    values = harmless_values(kind.model_fields, name) or ()
    allowed = " or ".join(f"`{value!r}`" for value in values if value is not None)
    return f"{found}{f' but {allowed}' if allowed else ''}"


def _only_value(kind: type[Body], name: str) -> typing.Any:
    """The one value, beside null, that a field takes; None: it takes others."""
    options = [each for each in typing.get_args(kind.model_fields[name].annotation) if each is not type(None)]
    is_literal = len(options) == 1 and typing.get_origin(options[0]) is typing.Literal
    values = typing.get_args(options[0]) if is_literal else ()
    return values[0] if len(values) == 1 else None


def page() -> str:
    names = sorted(set().union(*map(fields_of, BODIES)))
    rows = (_row([f"`{name}`", *(_cell(api, name) for api in BODIES)]) for name in names)
    head = ["field", *(f"`POST /v1/{path}`" for path in PATHS.values())]
    return _HEAD + "".join(f"{line}\n" for line in (_row(head), _row(["---"] * len(head)), *rows))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")

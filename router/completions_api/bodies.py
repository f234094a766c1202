"""Schema of request bodies of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from router.answer_details.details import DetailFields
from router.api.schemas import MAX_LOGPROBS, GenerationBody, TokenIdField
from router.features import COMMON_FIELDS, with_fields
from router.several_choices.fields import MAX_CHOICES, ChoiceFields

MAX_PROMPTS = 128


class CompletionBody(DetailFields, ChoiceFields, GenerationBody):
    """POST /v1/completions"""

    id_prefix = "cmpl-"
    prompt_field = "prompt"
    default_tokens = 16

    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIdField], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenIdField], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ],
        Field(description=f"a text, a list of token ids, or a list of at most {MAX_PROMPTS} of either; none empty"),
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        n = self.n or 1
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, or 0 together with echo: true", "max_tokens")
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequestError("best_of must not be smaller than n", "best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise InvalidRequestError("best_of cannot be streamed", "best_of")
        if len(self.prompts) * (self.best_of or n) > MAX_CHOICES:
            raise InvalidRequestError(f"prompts times choices must not exceed {MAX_CHOICES}", "n")
        return self

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def per_prompt(self) -> int:
        """Number of choices to generate for each prompt; the best `n` are shown."""
        return self.best_of or self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None and self.per_prompt > (self.n or 1):
            return 0  # the best choices are those with the highest mean logprob
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """The prompts of the request, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


COMPLETION_BODY = with_fields(CompletionBody, *COMMON_FIELDS)

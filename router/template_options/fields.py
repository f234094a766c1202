"""Request fields that control the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from common.text.chat_template import TemplateUse
from router.api.schemas import MAX_LABEL_CHARS, Body, GenerationBody, Label
from router.template_options.continued import ContinuedMessage

MAX_TEMPLATE_KWARGS = 16
TemplateKwargs = Annotated[
    Annotated[dict[Label, bool | int | float | Label | None], Field(max_length=MAX_TEMPLATE_KWARGS)] | None,
    Field(description=f"an object of at most {MAX_TEMPLATE_KWARGS} variables of the model's chat template, each a "
          f"boolean, a number, null or a text of at most {MAX_LABEL_CHARS} characters"),
]  # fmt: skip


class TemplateFields(Body):
    """Request fields of chats. Effort and verbosity become template variables, although few templates read them."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    reasoning_effort: Label | None = None
    verbosity: Label | None = None

    @model_validator(mode="after")
    def _check_template(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequestError(message, "continue_final_message")
        return self

    @property
    def continues_prompt(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def template_variables(self) -> dict[str, Any]:
        advice = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        given = {name: value for name, value in advice.items() if value is not None}
        return given | (self.chat_template_kwargs or {})


def use_for(body: GenerationBody) -> TemplateUse | None:
    """Return how to apply the template to a chat request; None for other requests."""
    if not isinstance(body, TemplateFields):
        return None
    continues = bool(body.continue_final_message)
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return template_use(adds, continues, body.template_variables)


def template_use(
    add_generation_prompt: bool, continue_final_message: bool, variables: Mapping[str, Any] | None
) -> TemplateUse:
    kind = ContinuedMessage if continue_final_message else TemplateUse
    return kind(add_generation_prompt, variables or {})

"""The format that a client asks of its answers: `response_format`, and vLLM's `structured_outputs`.

Both become a grammar (`common.grammar.grammar`) that workers follow. It is checked here, before any scheduling.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.grammar.json_schemas import closed, parsed_schema
from common.grammar.structural_tags import structural_tag
from router.api.schemas import Body, Label
from router.grammar.grammar_checks import GrammarChecks

MAX_CHOICE_CHARS = 4_096
MAX_LISTED_CHOICES = 4_096
MAX_CHARS_OF_CHOICES = 1 << 20  # every choice sends the grammar to its worker
CHECKS = GrammarChecks()


class JsonSchema(Body):
    """The schema is always followed; with `strict`, its objects allow no properties besides those it lists."""

    name: Label | None = None
    description: str | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """vLLM's structural tags have `structures` and `triggers`, or a `format`: `common.grammar.structural_tags`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "response_format takes a json_schema with type json_schema, and only then"
            raise InvalidRequestError(message, "response_format")
        if self.type != "structural_tag" and self.structural_tag:
            raise InvalidRequestError(f"{' and '.join(self.structural_tag)}: of structural tags", "response_format")
        return self

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The fields of a structural tag that are given."""
        fields = {"structures": self.structures, "triggers": self.triggers, "format": self.format}
        return {name: value for name, value in fields.items() if value is not None}


class StructuredOutputs(Body):
    """Exactly one of `json` to `structural_tag`. The last fields bound whitespace and other properties of JSON."""

    json_text: Annotated[Any, Field(alias="json")] = None  # a schema or its text
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]],
        Field(min_length=1, max_length=MAX_LISTED_CHOICES),
    ] | None = None  # fmt: skip
    grammar: str | None = None  # in Lark's syntax, or in GBNF
    structural_tag: Any = None  # an object or its text
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        if not isinstance(self.json_text, dict | str | None):
            raise InvalidRequestError(
                "structured_outputs.json must be a JSON schema or its text", "structured_outputs"
            )
        given = self.json_text, self.json_object, self.regex, self.choice, self.grammar, self.structural_tag
        if sum(each is not None for each in given) != 1:
            raise InvalidRequestError(
                "structured_outputs takes one of json, json_object, regex, choice, grammar and structural_tag",
                "structured_outputs",
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "disable_any_whitespace and whitespace_pattern exclude each other", "structured_outputs"
            )
        return self


class AnswerFields(Body):
    """Fields of a request's body that ask for a format."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_answer(self) -> AnswerFields:
        wants_format = self.response_format is not None and self.response_format.type != "text"
        if self.structured_outputs is not None and wants_format:
            raise InvalidRequestError(
                "structured_outputs and response_format exclude each other", "structured_outputs"
            )
        return self


async def answer_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, num_choices: int
) -> str:
    """Return the grammar that the fields ask for; empty: none. Raises InvalidRequestError if it cannot be used."""
    if structured is None and (response_format is None or response_format.type == "text"):
        return ""  # most requests: no need for a thread
    param = "structured_outputs" if structured is not None else "response_format"
    if structured is not None and structured.grammar is not None:
        found = await _of_grammar_text(structured.grammar)
    else:
        try:  # 0.3 s for the longest
            found = await asyncio.to_thread(
                lambda: _of_structured_outputs(structured) or _of_response_format(response_format)
            )
        except RecursionError:
            raise InvalidRequestError(f"{param}: the schema is nested too deep", param) from None
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: {error}", param) from None
    return await checked_grammar(found, param, num_choices) if found else ""


async def checked_grammar(found: str, param: str, num_choices: int = 1) -> str:
    """Check and return the grammar. Raises InvalidRequestError if it cannot be used, naming the field `param`."""
    if len(found) <= grammar.MAX_GRAMMAR_CHARS and len(found) * num_choices > MAX_CHARS_OF_CHOICES:
        raise InvalidRequestError(f"{num_choices} choices are too many for a grammar of {len(found)} characters", "n")
    try:
        await CHECKS.check(found)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param) from None
    return found


def json_answer_schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema that the whole answer must follow; None: none."""
    if wanted is None or wanted.type in ("text", "structural_tag"):
        return None
    return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.content


def followed_schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the schema of the whole answer, closed to other properties if it is strict."""
    schema = json_answer_schema(wanted)
    is_strict = wanted is not None and wanted.json_schema is not None and wanted.json_schema.strict
    return closed(schema) if schema is not None and is_strict else schema


def _of_response_format(wanted: ResponseFormat | None) -> str:
    if wanted is not None and wanted.type == "structural_tag":
        return structural_tag(wanted.structural_tag)
    schema = followed_schema(wanted)
    return "" if schema is None else grammar.json_schema(schema)


async def _of_grammar_text(text: str) -> str:
    if not grammar.is_gbnf(text):
        return grammar.lark(text)
    try:
        return await asyncio.to_thread(grammar.gbnf, text)  # 0.6 s for the longest
    except InvalidRequestError as error:
        raise InvalidRequestError(f"structured_outputs: {error}", "structured_outputs") from None


def _of_structured_outputs(wanted: StructuredOutputs | None) -> str:
    if wanted is None:
        return ""
    if wanted.regex is not None:
        return grammar.regex(wanted.regex)
    if wanted.choice is not None:
        return grammar.choice(wanted.choice)
    if wanted.structural_tag is not None:
        tag = wanted.structural_tag
        return structural_tag((parsed_schema(tag) or {}) if isinstance(tag, str) else tag)
    given = {"type": "object"} if wanted.json_text is None else wanted.json_text
    schema = parsed_schema(given) if isinstance(given, str) else given
    if schema is None:
        return grammar.json_schema(given)  # its check says what is wrong with the text
    if wanted.disable_additional_properties:
        schema = closed(schema)
    if wanted.disable_any_whitespace:
        return grammar.compact_json(schema)
    return grammar.json_schema(schema, wanted.whitespace_pattern)

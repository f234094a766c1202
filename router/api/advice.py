"""Fields that advise a model, and change nothing where its chat template does not read them. Pure.

The answer's header names them (`x-mini-infer-ignored`), with those that change nothing for any model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from router.api.message_schemas import Body
from router.api.schemas import ChatCompletionBody

MAX_NAMED = 16  # fields, as proxies bound what headers hold


def unheeded(body: ChatCompletionBody, known: Set[str], added: Set[str], effort_field: str) -> list[str]:
    """The fields of a chat request that its template does not read.

    known: the template's variables. added: variables that other fields ask for. effort_field: what asks for an
    effort; empty: it is heeded in another way.
    """
    fields = []
    if body.reasoning_effort is not None and effort_field and "reasoning_effort" not in known:
        fields.append(effort_field)
    if body.verbosity is not None and "verbosity" not in known:
        fields.append("verbosity")
    for name in sorted((body.chat_template_kwargs or {}).keys() - known - added):
        is_plain = name.isascii() and name.isidentifier()  # a client's text does not get into a header otherwise
        fields.append(f"chat_template_kwargs.{name[:64]}" if is_plain else "chat_template_kwargs")
    return fields


def without_effect(kind: type[Body], fields: Mapping[str, Any]) -> list[str]:
    """The fields within fields of a body that change nothing."""
    found = []
    for path in sorted(kind.no_effect):
        head, _, name = path.partition(".")
        inner = fields.get(head)
        if name and isinstance(inner, dict) and inner.get(name) is not None:
            found.append(path)
    return found


def header_of(fields: Sequence[str]) -> str:
    """What names these fields in a header."""
    named = list(dict.fromkeys(fields))
    return ", ".join([*named[:MAX_NAMED], *["..."] * (len(named) > MAX_NAMED)])

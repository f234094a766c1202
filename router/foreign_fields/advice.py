"""Fields that advise a model, and change nothing where its chat template does not read them. Pure.

The answer's header names them (`x-mini-infer-ignored`), with those that change nothing for any model.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping, Set
from typing import Any

from router.foreign_fields.known_fields import is_ignored

IGNORED = "router.ignored"  # in the scope of a request: fields of its body that change nothing
MAX_NAMED = 16  # fields, as proxies bound what headers hold


def unheeded(
    effort_field: str, asks_verbosity: bool, variables: Collection[str], known: Set[str], added: Set[str]
) -> list[str]:
    """The fields of a chat request that its template does not read.

    effort_field: what asks for an effort; empty: nothing does, or it is heeded in another way. variables: of the
    template, as the request has them. known: those that the template has. added: those that other fields ask for.
    """
    fields = []
    if effort_field and "reasoning_effort" not in known:
        fields.append(effort_field)
    if asks_verbosity and "verbosity" not in known:
        fields.append("verbosity")
    for name in sorted(set(variables) - known - added):
        is_plain = name.isascii() and name.isidentifier()  # a client's text does not get into a header otherwise
        fields.append(f"chat_template_kwargs.{name[:64]}" if is_plain else "chat_template_kwargs")
    return fields


def without_effect(own: Container[str], no_effect: Collection[str], fields: Mapping[str, Any]) -> list[str]:
    """The fields of a body, and the fields within them, that change nothing: see `is_ignored`."""
    found = [name for name in fields if is_ignored(own, no_effect, name)]
    for path in sorted(no_effect):
        head, _, name = path.partition(".")
        inner = fields.get(head)
        if name and isinstance(inner, dict) and inner.get(name) is not None:
            found.append(path)
    return found


def note_ignored(scope: MutableMapping[str, Any], fields: Iterable[str]) -> None:
    """Note fields of a request that change nothing, in its scope, for `header_of`."""
    scope.setdefault(IGNORED, []).extend(fields)


def header_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """The header of a request's answer that names what was noted, if anything was."""
    named = list(dict.fromkeys(scope.get(IGNORED, ())))
    shown = [*named[:MAX_NAMED], *["..."] * (len(named) > MAX_NAMED)]
    return {"x-mini-infer-ignored": ", ".join(shown)} if named else {}

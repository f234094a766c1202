"""Fields that only advise a model, and have no effect if its chat template does not read them. Pure.

The response header `x-mini-infer-ignored` names them, and the fields that have no effect for any model.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping, Set
from typing import Any

from router.foreign_fields.known_fields import is_ignored, own_fields

IGNORED = "router.ignored"  # in a request's scope: fields of its body without effect
MAX_NAMED = 16  # fields, since proxies limit the size of headers


def unheeded(
    effort_field: str, asks_verbosity: bool, variables: Collection[str], known: Set[str], added: Set[str]
) -> list[str]:
    """Return the fields of a chat request that its template does not read.

    effort_field: the field that asks for an effort; empty: none does, or it is followed without the template.
    variables: template variables in the request. known: those in the template. added: those set by other fields.
    """
    fields = []
    if effort_field and "reasoning_effort" not in known:
        fields.append(effort_field)
    if asks_verbosity and "verbosity" not in known:
        fields.append("verbosity")
    for name in sorted(set(variables) - known - added):
        is_plain = name.isascii() and name.isidentifier()  # otherwise the client's text must not get into a header
        fields.append(f"chat_template_kwargs.{name[:64]}" if is_plain else "chat_template_kwargs")
    return fields


def without_effect(own: Container[str], no_effect: Collection[str], fields: Mapping[str, Any]) -> list[str]:
    """Return the fields of a body, and fields inside of them, that have no effect: see `is_ignored`."""
    found = [name for name in fields if is_ignored(own, no_effect, name)]
    for path in sorted(no_effect):
        head, _, name = path.partition(".")
        inner = fields.get(head)
        if name and isinstance(inner, dict) and inner.get(name) is not None:
            found.append(path)
    return found


def own_fields_of(
    own: Container[str], no_effect: Collection[str], fields: Mapping[str, Any], scope: MutableMapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of a body without those of other servers; note in its scope, if any, what has no effect."""
    if scope is not None:
        note_ignored(scope, without_effect(own, no_effect, fields))
    return own_fields(own, fields)


def note_ignored(scope: MutableMapping[str, Any], fields: Iterable[str]) -> None:
    """Record fields of a request without effect in its scope, for `header_of`."""
    scope.setdefault(IGNORED, []).extend(fields)


def header_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the response header that names the recorded fields, if there are any."""
    named = list(dict.fromkeys(scope.get(IGNORED, ())))
    shown = [*named[:MAX_NAMED], *["..."] * (len(named) > MAX_NAMED)]
    return {"x-mini-infer-ignored": ", ".join(shown)} if named else {}

"""Validate the fields of a request body, and say in a client's words what is wrong with them.

A field is honoured, harmless by the lists of `router/foreign_fields`, or refused with a message that names it; none
is ignored silently.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from common.errors import InvalidRequestError
from common.wings import has_wing
from router.api.schemas import Body, Message

HAS_FOREIGN_FIELDS = has_wing("router.foreign_fields")
if HAS_FOREIGN_FIELDS:
    from router.foreign_fields.known_fields import own_fields

B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], fields: dict[str, Any]) -> B:
    """Validate `fields`. Raises InvalidRequestError that names the field."""
    if HAS_FOREIGN_FIELDS:
        fields = own_fields(kind.model_fields, fields)
    try:
        return kind.model_validate(fields)
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

"""The field of requests that ask for several choices."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.api.schemas import Body, GenerationBody

MAX_CHOICES = 128  # per request


class ChoiceFields(Body):
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None


def num_choices(body: GenerationBody) -> int:
    """Return the number of choices that a request asks for."""
    return (body.n if isinstance(body, ChoiceFields) else None) or 1

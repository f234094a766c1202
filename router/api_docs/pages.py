"""The description of the API: FastAPI's OpenAPI of the routes, and a page that shows it.

FastAPI's own pages load scripts from other sites; this one needs neither network nor scripts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Annotated, Any

from fastapi import Body
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from common import VERSION
from common.wings import has_wing
from router.http.routes import Described, Routes, json_response

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }}
code {{ font-family: ui-monospace, monospace }} td {{ vertical-align: top; padding: .15rem 1rem .15rem 0 }}
h2 {{ margin: 2rem 0 0; font-size: 1.1rem }} p {{ margin: .2rem 0 }}
</style><h1>{title}</h1><p>Version {version}. The same for programs, with the fields that are
accepted without effect: <a href="openapi.json">openapi.json</a></p>
{body}</html>
"""
_NO_EFFECT = "Accepted, without effect."
# The response of any operation that fails. Without it FastAPI would describe its own errors, which no handler raises.
ERRORS: dict[int | str, dict[str, Any]] = {"default": {"description": "An error: message, type, parameter and code."}}


def add_documentation(routes: Routes, _: object) -> None:
    """Serve the description of all routes added so far."""
    described = list(routes.described)

    @cache
    def description() -> dict[str, Any]:
        """Build it at the first request, which takes longer than the rest of the router's start."""
        return openapi(described)

    async def documentation(_: Request) -> Response:
        return HTMLResponse(page(description()))

    async def schema(_: Request) -> Response:
        return json_response(description())

    routes.add("GET", "/docs", documentation, "this page")
    routes.add("GET", "/openapi.json", schema, "its content for programs")


def openapi(described: Sequence[Described]) -> dict[str, Any]:
    """Return the description of an API in OpenAPI 3.1."""
    routes = list(map(_for_fastapi, described))
    made = get_openapi(title="mini-infer", version=VERSION, routes=routes)
    for each, route in zip(described, routes, strict=True):
        if each.body is not None:
            schema = made["components"]["schemas"][_body_name(made["paths"][route.path_format][each.method.lower()])]
            schema["properties"] |= _accepted_besides(each.body)
    return made


def _for_fastapi(described: Described) -> APIRoute:
    """Return a route for FastAPI to describe, with a signature made of `body` and `query`.

    The route is not served: FastAPI would parse each body and argument a second time.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    found = [inspect.Parameter(name, kind, annotation=str) for name in re.findall(r"{(\w+)", described.path)]
    for name, told in described.query.items():
        annotation, default = (told | None, None) if isinstance(told, type) else (type(told), told)
        found.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    if described.body is not None:
        found.append(inspect.Parameter("body", kind, annotation=Annotated[described.body, Body()]))

    async def endpoint() -> None:
        """Never called: FastAPI only reads its signature."""

    endpoint.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return APIRoute(
        described.path, endpoint, methods=[described.method], summary=described.summary, name=described.summary,
        operation_id=f"{described.method.lower()} {described.path}", responses=dict(ERRORS), response_model=None,
        response_class=Response, response_description="The answer.",
    )  # fmt: skip


def _accepted_besides(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of fields that a body may have besides its own, so that clients that check bodies allow
    them."""
    if not has_wing("router.foreign_fields"):
        return {}
    from router.foreign_fields.known_fields import accepted_besides

    return {
        name: {"description": _NO_EFFECT, **({} if values is None else {"enum": list(values)})}
        for name, values in accepted_besides(kind.model_fields).items()
    }


def _body_name(operation: dict[str, Any]) -> str:
    """Return the type of an operation's body."""
    reference: str = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return reference.rpartition("/")[2]


def page(description: dict[str, Any]) -> str:
    """Return HTML for the result of `openapi`: every operation with the fields of its body, then their types."""
    pieces = []
    schemas = description["components"]["schemas"]
    bodies = set()
    for path, methods in description["paths"].items():
        for method, entry in methods.items():
            pieces.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(entry['summary'])}</p>")
            if "requestBody" in entry:
                bodies.add(name := _body_name(entry))
                pieces.append(_fields(schemas[name]))
    for name, schema in schemas.items():
        if name not in bodies:
            pieces.append(f"<h2><code>{escape(name)}</code></h2>{_fields(schema)}")
    return _PAGE.format(body="\n".join(pieces), **description["info"])


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in required else ''}"
        f"<td><code>{escape(field.get('description') or _type(field))}</code>"
        for name, field in schema["properties"].items()
        if field.get("description") != _NO_EFFECT
    ]
    return f"<details><summary>Fields</summary><table>{''.join(rows)}</table></details>"


def _type(schema: dict[str, Any]) -> str:
    """Describe a field's type and bounds in a few characters, without null, which every optional field allows."""
    if "anyOf" in schema:
        return " | ".join(_type(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    signs = {
        "minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "maxItems": "at most",
    }  # fmt: skip
    bounds = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind

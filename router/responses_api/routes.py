"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import orjson
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.errors import InvalidRequestError
from common.text.tokenizer import Tokenizer
from router.api.parse import parse_body
from router.api.render import RenderOptions
from router.features import CHAT_BODY, Features
from router.gateway import Gateway
from router.http.body import read_json_object
from router.http.errors import FIELD_NAMES
from router.http.routes import Routes, json_response
from router.http.sse import EVENT_STREAM_HEADERS
from router.responses_api.background import Background
from router.responses_api.output import DeltaLengths
from router.responses_api.queries import DEFAULT_LIMIT, first_event, page_of
from router.responses_api.renderer import ResponsesRenderer
from router.responses_api.replay import replay
from router.responses_api.schemas import AnyItem, ResponsesBody
from router.responses_api.store import ResponseStore
from router.responses_api.translation import chat_fields, client_field, messages_of

_ITEMS = TypeAdapter(list[AnyItem])


def add_response_routes(routes: Routes, gateway: Gateway) -> None:
    store, background = ResponseStore(), Background()
    routes.tasks.append(background.end_with_the_router)

    async def create(request: Request) -> Response:
        arrival = time.monotonic()
        with gateway.bodies.hold() as held:
            body = gateway.parse(ResponsesBody, request, await read_json_object(request, held))
            if body.background and body.store is False:
                raise InvalidRequestError("a response in the background has to be stored", "background")
            earlier: list[dict[str, Any]] = []
            if body.previous_response_id is not None:
                if background.get(body.previous_response_id) is not None:
                    raise InvalidRequestError("that response is not complete yet", "previous_response_id")
                earlier = orjson.loads(store.get(body.previous_response_id).messages)
            messages = [*earlier, *messages_of(body.input)]
            fields = chat_fields(body, messages)
            facts = _facts(body)
            items = _input_items(body)

            def keep(response: dict[str, Any], delta_lengths: DeltaLengths) -> None:
                if body.store is not False:
                    said = messages_of(_ITEMS.validate_python(response["output"]))
                    store.add(response, [*messages, *said], items, delta_lengths)

            renderers: list[ResponsesRenderer] = []

            def renderer_of(_: Features, options: RenderOptions, tokenizer: Tokenizer) -> ResponsesRenderer:
                renderers.append(ResponsesRenderer(options, tokenizer, facts, keep))
                return renderers[0]

            request.scope[FIELD_NAMES] = [partial(client_field, body, len(earlier))]
            answer = await gateway.chat(request, parse_body(CHAT_BODY, fields), arrival, renderer_of)
            if not body.background:
                return answer
            keep(renderers[0].snapshot(), [])
            running = background.start(facts["id"], answer, renderers[0], request.scope)
            headers = gateway.answer_headers(request)
            if body.stream:
                return StreamingResponse(running.events(0), headers=EVENT_STREAM_HEADERS | headers)
            return Response(running.snapshot(), headers=headers, media_type="application/json")

    async def retrieve(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        running = background.get(response_id)
        response = running.snapshot() if running else store.get(response_id).response
        first = first_event(request.query_params)
        if first is None:
            return Response(response, media_type="application/json")
        if running:
            events = running.events(first)
        else:
            lengths = orjson.loads(store.get(response_id).delta_lengths)
            events = _sent(replay(orjson.loads(response), lengths, first))
        return StreamingResponse(events, headers=EVENT_STREAM_HEADERS)

    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if running := background.get(response_id):
            await running.cancel()
        store.delete(response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def cancel(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if running := background.get(response_id):
            await running.cancel()
        response = store.get(response_id).response
        if not orjson.loads(response)["background"]:
            raise InvalidRequestError(
                "only a response in the background can be cancelled; close the stream", "response_id"
            )
        return Response(response, media_type="application/json")

    async def input_items(request: Request) -> Response:
        items = orjson.loads(store.get(request.path_params["response_id"]).input_items)
        return json_response(page_of(items, request.query_params))

    one = "/v1/responses/{response_id}"
    routes.add("POST", "/v1/responses", create, "the response to an input", ResponsesBody)
    events = {"stream": False, "starting_after": int}
    routes.add("GET", one, retrieve, "a response that was stored, or its events", query=events)
    routes.add("DELETE", one, delete, "forget it")
    routes.add("POST", f"{one}/cancel", cancel, "end a response that runs in the background")
    listing = {"order": "desc", "limit": DEFAULT_LIMIT, "after": str}
    routes.add("GET", f"{one}/input_items", input_items, "what it was a response to", query=listing)


async def _sent(events: Iterable[bytes]) -> AsyncIterator[bytes]:
    """On the event loop, which sends while the client keeps up."""
    for event in events:
        yield event


def _facts(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request."""
    given = body.model_dump(by_alias=True, exclude={"input", "stream", "stream_options", "include"})
    text = {"format": {"type": "text"}} | {key: value for key, value in (given["text"] or {}).items() if value}
    reasoning = given["reasoning"] or {"effort": None, "summary": None}
    return {
        **given,
        "id": f"resp_{secrets.token_hex(16)}",
        "store": body.store is not False,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": given["tool_choice"] or "auto",
        "tools": given["tools"] or [],
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "background": bool(body.background),
        "metadata": body.metadata or {},
        "text": text,
        "reasoning": reasoning,
    }


def _input_items(body: ResponsesBody) -> list[dict[str, Any]]:
    if isinstance(body.input, str):
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}
        return [{"id": f"msg_{secrets.token_hex(16)}", **message}]
    return [{"id": f"item_{secrets.token_hex(16)}", **item.model_dump()} for item in body.input]

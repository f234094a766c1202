"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import orjson
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.errors import InvalidRequestError
from common.text.tokenizer import Tokenizer
from router.api.render import RenderOptions
from router.features import CHAT_BODY, Features
from router.gateway import FEATURES, Gateway
from router.http.answer import EVENT_STREAM_HEADERS
from router.http.body import parse_body, read_json_object
from router.http.errors import FIELD_NAMES
from router.http.routes import Routes, json_response
from router.responses_api.background import Background
from router.responses_api.output import DeltaLengths
from router.responses_api.queries import DEFAULT_LIMIT, first_event, page_of
from router.responses_api.renderer import ResponsesRenderer
from router.responses_api.replay import replay
from router.responses_api.schemas import AnyItem, ChatFields, ItemReference, MessageItem, ResponsesBody
from router.responses_api.store import ResponseStore, StoredResponse
from router.responses_api.translation import chat_fields, client_field, messages_of, namespaces_of

_ITEM = TypeAdapter[AnyItem](AnyItem)
_ITEMS = TypeAdapter(list[AnyItem])


def add_response_routes(routes: Routes, gateway: Gateway) -> None:
    own, one = _Responses(gateway), "/v1/responses/{response_id}"
    routes.tasks.append(own.background.end_with_the_router)
    routes.add("POST", "/v1/responses", own.create, "the response to an input", ResponsesBody)
    routes.add("POST", "/v1/responses/input_tokens", own.input_tokens, "the tokens of its prompt", ResponsesBody)
    events = {"stream": False, "starting_after": int}
    routes.add("GET", one, own.retrieve, "a response that was stored, or its events", query=events)
    routes.add("DELETE", one, own.delete, "forget it")
    routes.add("POST", f"{one}/cancel", own.cancel, "end a response that runs in the background")
    listing = {"order": "desc", "limit": DEFAULT_LIMIT, "after": str}
    routes.add("GET", f"{one}/input_items", own.input_items, "what it was a response to", query=listing)


class _Responses:
    """Handlers of the routes, with the responses that they share."""

    def __init__(self, gateway: Gateway) -> None:
        self.background = Background()
        self._gateway = gateway
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response:
        arrival = time.monotonic()
        body = parse_body(ResponsesBody, await read_json_object(request), request.scope)
        if body.background and body.store is False:
            raise InvalidRequestError("a response in the background has to be stored", "background")
        body = self._resolved(body)
        earlier = self._earlier(body)
        messages = [*earlier, *messages_of(body.input)]
        fields = chat_fields(body, messages)
        facts = _facts(body)
        namespaces = namespaces_of(body)
        items = _input_items(body)

        def keep(response: dict[str, Any], delta_lengths: DeltaLengths) -> None:
            if body.store is not False:
                said = messages_of(_ITEMS.validate_python(response["output"]))
                self._store.add(response, [*messages, *said], items, delta_lengths)

        renderers: list[ResponsesRenderer] = []

        def renderer_of(_: Features, options: RenderOptions, tokenizer: Tokenizer) -> ResponsesRenderer:
            renderers.append(ResponsesRenderer(options, tokenizer, facts, keep, namespaces))
            return renderers[0]

        request.scope[FIELD_NAMES] = [partial(client_field, body, len(earlier))]
        answer = await self._gateway.chat(request, parse_body(CHAT_BODY, fields), arrival, renderer_of)
        if not body.background:
            return answer
        keep(renderers[0].snapshot(), [])
        running = self.background.start(facts["id"], answer, renderers[0], request.scope)
        headers = self._gateway.answer_headers(request)
        if body.stream:
            return StreamingResponse(running.events(0), headers=EVENT_STREAM_HEADERS | headers)
        return Response(running.snapshot(), headers=headers, media_type="application/json")

    async def input_tokens(self, request: Request) -> Response:
        body = self._resolved(parse_body(ResponsesBody, await read_json_object(request)))
        earlier = self._earlier(body)
        chat_body = chat_fields(body, [*earlier, *messages_of(body.input)])
        request.scope[FIELD_NAMES] = [partial(client_field, body, len(earlier))]
        chat = parse_body(CHAT_BODY, chat_body)
        model = self._gateway.model_for(request, chat.model)
        features = await FEATURES.of(chat, 1, model.tokenizer, self._gateway.config, request.scope)
        num_tokens = len(await self._gateway.prompt_ids(model, chat, features))
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    def _earlier(self, body: ResponsesBody) -> list[dict[str, Any]]:
        """Return the messages up to the response that a request continues. Raises MiniInferError."""
        if body.previous_response_id is None:
            return []
        if self.background.get(body.previous_response_id) is not None:
            raise InvalidRequestError("that response is not complete yet", "previous_response_id")
        messages: list[dict[str, Any]] = orjson.loads(self._store.get(body.previous_response_id).messages)
        return messages

    def _resolved(self, body: ResponsesBody) -> ResponsesBody:
        """Replace references to stored items by the items. Raises NotFoundError."""
        if isinstance(body.input, str) or not any(isinstance(item, ItemReference) for item in body.input):
            return body
        items = [
            _ITEM.validate_python(self._store.item(item.id)) if isinstance(item, ItemReference) else item
            for item in body.input
        ]
        return body.model_copy(update={"input": items})

    async def retrieve(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        running = self.background.get(response_id)
        first = first_event(request.query_params)
        if running:
            response = running.snapshot() if first is None else running.events(first)
        else:
            stored = self._store.get(response_id)
            response = stored.response if first is None else _replayed(stored, first)
        if isinstance(response, bytes):
            return Response(response, media_type="application/json")
        return StreamingResponse(response, headers=EVENT_STREAM_HEADERS)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if running := self.background.get(response_id):
            await running.cancel()
        self._store.delete(response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if running := self.background.get(response_id):
            await running.cancel()
        response = self._store.get(response_id).response
        if not orjson.loads(response)["background"]:
            raise InvalidRequestError(
                "only a response in the background can be cancelled; close the stream", "response_id"
            )
        return Response(response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        items = orjson.loads(self._store.get(request.path_params["response_id"]).input_items)
        return json_response(page_of(items, request.query_params))


async def _replayed(stored: StoredResponse, first: int) -> AsyncIterator[bytes]:
    """Yield the stored response's events from number `first` on; on the event loop, as fast as the client reads."""
    for event in replay(orjson.loads(stored.response), orjson.loads(stored.delta_lengths), first):
        yield event


def _facts(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    unsaid = {"input", "stream", "stream_options", "include", *ChatFields.model_fields}
    given = body.model_dump(by_alias=True, exclude=unsaid)
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
    return [{"id": f"item_{secrets.token_hex(16)}", **_listed(item)} for item in body.input]


def _listed(item: AnyItem) -> dict[str, Any]:
    """Return the fields of an input item in lists of them, where OpenAI's clients expect messages as parts."""
    fields = item.model_dump()
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    return fields

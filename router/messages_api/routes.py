"""Routes of Anthropic's Messages API."""

from __future__ import annotations

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.features import CHAT_BODY, with_fields
from router.gateway import FEATURES, Gateway
from router.http.body import parse_body, read_json_object
from router.http.errors import ERROR_SHAPE, FIELD_NAMES
from router.http.routes import Routes, json_response
from router.messages_api.renderer import MessagesRenderer, error_shape
from router.messages_api.schemas import MessagesBody, PromptBody
from router.messages_api.translation import chat_fields, client_field, takes_system_messages

MESSAGES_CHAT_BODY = with_fields(CHAT_BODY, "router.messages_api.schemas:ChatFields")


def add_message_routes(routes: Routes, gateway: Gateway) -> None:
    async def messages(request: Request) -> Response:
        request.scope[ERROR_SHAPE] = error_shape
        arrival = time.monotonic()
        body = parse_body(MessagesBody, await read_json_object(request), request.scope)
        takes_system = takes_system_messages(gateway.model_for(request, body.model).tokenizer)
        fields = chat_fields(body, takes_system)
        request.scope[FIELD_NAMES] = [partial(client_field, body, takes_system)]
        chat = parse_body(MESSAGES_CHAT_BODY, fields)
        return await gateway.chat(
            request, chat, arrival, lambda _, options, tokenizer: MessagesRenderer(options, tokenizer, body)
        )

    async def count_tokens(request: Request) -> Response:
        request.scope[ERROR_SHAPE] = error_shape
        body = parse_body(PromptBody, await read_json_object(request))
        takes_system = takes_system_messages(gateway.model_for(request, body.model).tokenizer)
        fields = chat_fields(body, takes_system)
        request.scope[FIELD_NAMES] = [partial(client_field, body, takes_system)]
        chat = parse_body(CHAT_BODY, fields)
        model = gateway.model_for(request, chat.model)
        features = await FEATURES.of(chat, 1, model.tokenizer, gateway.config, request.scope)
        return json_response({"input_tokens": len(await gateway.prompt_ids(model, chat, features))})

    routes.add("POST", "/v1/messages", messages, "the answer to a conversation, as Anthropic's API", MessagesBody)
    routes.add("POST", "/v1/messages/count_tokens", count_tokens, "the tokens of its prompt", PromptBody)

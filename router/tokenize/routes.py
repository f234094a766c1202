"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.prompts import text_prompt
from router.api.sampling import checked_ids
from router.features import CHAT_BODY
from router.gateway import Gateway
from router.http.body import parse_body, read_json_object
from router.http.routes import Routes, json_response
from router.tokenize.bodies import DetokenizeBody, TokenizeBody


def add_tokenize_routes(routes: Routes, gateway: Gateway) -> None:
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_json_object(request))
        model = gateway.model_for(request, body.model)
        limits = model.limits()
        if body.messages is not None:
            chat = parse_body(CHAT_BODY, body.chat_fields)
            features = await gateway.features(request, model, chat, 1)
            token_ids = await gateway.prompt_ids(model, chat, features)
        elif body.prompt:
            token_ids = await text_prompt(body.prompt, model.tokenizer, limits, body.add_special_tokens)
        else:
            token_ids = model.tokenizer.encode("", add_special_tokens=body.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(token_ids), "max_model_len": limits.max_model_len, "tokens": token_ids,
        }  # fmt: skip
        if body.return_token_strs:
            answer["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_json_object(request))
        model = gateway.model_for(request, body.model)
        token_ids = checked_ids(body.tokens, model.tokenizer.vocab_size, "tokens")
        return json_response({"prompt": model.tokenizer.decode(token_ids, skip_special=False)})

    routes.add("POST", "/tokenize", tokenize, "the token ids of a text or a conversation", TokenizeBody)
    routes.add("POST", "/detokenize", detokenize, "the text of token ids", DetokenizeBody)

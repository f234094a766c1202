"""POST /v1/completions: continues texts or token ids."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from common.text.tokenizer import Tokenizer
from router.api.prompts import text_prompt
from router.api.render import Details
from router.api.sampling import checked_ids
from router.completions_api.bodies import COMPLETION_BODY, CompletionBody
from router.completions_api.renderer import CompletionRenderer
from router.features import truncated
from router.gateway import Gateway
from router.http.body import parse_body, read_json_object
from router.http.routes import Routes
from router.workers.model_workers import ModelLimits


def add_completion_route(routes: Routes, gateway: Gateway) -> None:
    async def completions(http: Request) -> Response:
        arrival = time.monotonic()
        body = parse_body(COMPLETION_BODY, await read_json_object(http), http.scope)
        model = gateway.model_for(http, body.model)
        model.dispatcher.admit()
        encoded = await completion_prompts(body, model.tokenizer, model.limits())
        prompts = truncated(body, model.limits(), encoded)
        features = await gateway.features(http, model, body, len(prompts) * body.per_prompt)
        request = gateway.request(http, model, body, features, prompts, body.per_prompt, arrival)
        shown = () if not body.echo else body.prompts if prompts is encoded else prompts  # or as truncated
        options = gateway.options(request, model, body, Details())
        renderer = CompletionRenderer(options, model.tokenizer, body, prompts, shown)
        return gateway.respond(http, request, renderer, bool(body.stream))

    routes.add("POST", "/v1/completions", completions, "the continuation of a text", COMPLETION_BODY)


async def completion_prompts(body: CompletionBody, tokenizer: Tokenizer, limits: ModelLimits) -> list[list[int]]:
    """Return the token ids of every prompt of the request."""
    return [
        await text_prompt(item, tokenizer, limits, body.add_special_tokens is not False)
        if isinstance(item, str)
        else checked_ids(item, limits.vocab_size, "prompt")
        for item in body.prompts
    ]

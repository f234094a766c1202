"""Routes of embeddings, scores and reranking."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from common.errors import ContextLengthError, InvalidRequestError
from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.api.prompts import chat_prompt, text_prompt
from router.api.render import RenderOptions
from router.api.sampling import checked_ids
from router.api.text import ChoiceText, TextRules
from router.choice import Choice
from router.embeddings_api.documents import document_ids
from router.embeddings_api.renderers import EmbeddingRenderer, RerankRenderer, ScoreRenderer, VectorRenderer
from router.embeddings_api.request import VectorRequest, sampling
from router.embeddings_api.schemas import EmbeddingBody, RerankBody, ScoreBody, VectorBody
from router.embeddings_api.settings import PoolingSettings
from router.embeddings_api.vectors import Vector, shortened
from router.gateway import MAX_LABEL_CHARS, Gateway
from router.http.body import parse_body, read_json_object
from router.http.errors import REQUEST_ID
from router.http.routes import Routes
from router.journal import Journal
from router.served_model import ServedModel
from router.template_options.fields import template_use
from router.truncation.truncation import truncated

CHAT = "messages"
Input = tuple[str, str | Sequence[int] | EmbeddingBody]
"""The client's field that contains the input, and the input: a text, token ids, or a body with messages."""
RendererOf = Callable[[VectorRequest, RenderOptions, Tokenizer], VectorRenderer]


def add_embedding_routes(routes: Routes, gateway: Gateway) -> None:
    async def embeddings(http: Request) -> Response:
        arrival = time.monotonic()
        body = parse_body(EmbeddingBody, await read_json_object(http), http.scope)
        inputs = [(CHAT, body)] if body.messages else [("input", each) for each in body.inputs]
        finish = partial(shortened, dimensions=body.dimensions, normalizes=body.normalizes)
        renderer_of = partial(EmbeddingRenderer, is_base64=body.encoding_format == "base64")
        return await _respond(gateway, http, body, arrival, "embd", inputs, finish, renderer_of)

    async def score(http: Request) -> Response:
        arrival = time.monotonic()
        body = parse_body(ScoreBody, await read_json_object(http), http.scope)
        inputs = [("text_1", each) for each in body.left] + [("text_2", each) for each in body.right]
        renderer_of = partial(ScoreRenderer, num_right=len(body.right))
        return await _respond(gateway, http, body, arrival, "score", inputs, shortened, renderer_of)

    async def rerank(http: Request) -> Response:
        arrival = time.monotonic()
        body = parse_body(RerankBody, await read_json_object(http), http.scope)
        inputs = [("query", body.query), *(("documents", each) for each in body.texts)]
        shown = body.texts if body.return_documents is not False else []
        renderer_of = partial(RerankRenderer, top_n=body.top_n or None, documents=shown)
        return await _respond(gateway, http, body, arrival, "rerank", inputs, shortened, renderer_of)

    routes.add("POST", "/v1/embeddings", embeddings, "vectors of texts", EmbeddingBody)
    routes.add("POST", "/v1/score", score, "how near pairs of texts are, by their vectors", ScoreBody)
    routes.add("POST", "/score", score, "the same", ScoreBody)
    routes.add("POST", "/v1/rerank", rerank, "documents by how near they are to a query", RerankBody)
    routes.add("POST", "/v2/rerank", rerank, "the same", RerankBody)  # Cohere's path; the one above is Jina's
    routes.add("POST", "/rerank", rerank, "the same", RerankBody)


async def _respond(
    gateway: Gateway,
    http: Request,
    body: VectorBody,
    arrival: float,
    kind: str,
    inputs: Sequence[Input],
    finish: Callable[[Vector], Vector],
    renderer_of: RendererOf,
) -> Response:
    """Return the answer; sending it computes the vectors of all inputs. finish: processes each vector."""
    model = gateway.model_for(http, body.model)
    model.dispatcher.admit()
    prompts = [await _prompt_ids(model, body, *each) for each in inputs]
    request_id = http.scope[REQUEST_ID] = f"{kind}-{uuid.uuid4().hex}"
    choices = _choices(gateway, http, model, body, arrival, request_id, prompts)
    request = VectorRequest(request_id, choices, model.metrics, finish)
    options = RenderOptions(request_id, body.model or model.name, int(time.time()))
    return gateway.respond(http, request, renderer_of(request, options, model.tokenizer), is_stream=False)


def _choices(
    gateway: Gateway,
    http: Request,
    model: ServedModel,
    body: VectorBody,
    arrival: float,
    request_id: str,
    prompts: Sequence[list[int]],
) -> list[Choice]:
    timeout = gateway.timeout_seconds(http, False)
    params = sampling(body.pooling or gateway.config.of(PoolingSettings).pooling)
    shared = pb.Submit(priority=body.priority, adapter=model.adapter, cache_salt=body.cache_salt)
    session = http.headers.get("x-session-id", "")[:MAX_LABEL_CHARS] or body.user or ""
    choices = []
    for index, token_ids in enumerate(prompts):
        journal = Journal(
            choice_id=f"{request_id}-{index}",
            prompt_token_ids=token_ids,
            sampling=params,
            deadline=arrival + timeout,
            arrival=arrival,
            request=shared,
            session=session,
        )
        text = ChoiceText(model.tokenizer, TextRules(continues=True))
        choices.append(Choice(index, journal, text, model.dispatcher))
    return choices


async def _prompt_ids(
    model: ServedModel, body: VectorBody, param: str, given: str | Sequence[int] | EmbeddingBody
) -> list[int]:
    """Return the token ids of one input. Raises InvalidRequestError."""
    limits = model.limits()
    if given == "":
        raise InvalidRequestError(f"a text of {param} is empty", param)
    if isinstance(given, str) and isinstance(body, RerankBody) and param == "documents":
        token_ids = await document_ids(model, body, given)
    elif isinstance(given, str):
        token_ids = await text_prompt(given, model.tokenizer, limits, body.add_special_tokens, param)
    elif isinstance(given, EmbeddingBody):
        token_ids = await chat_prompt(
            given.messages or (),
            model.tokenizer,
            limits,
            template_use(given.add_generation_prompt, given.continue_final_message, given.chat_template_kwargs),
        )
    else:
        token_ids = checked_ids(given, limits.vocab_size, param)
    most = limits.max_model_len - 1  # the token that comes with a vector needs a position, too
    token_ids = truncated(token_ids, body.truncate_prompt_tokens, most, body.truncation_side)
    if len(token_ids) > most:
        however = f"your {param} resulted in {len(token_ids)} tokens, and a vector takes at most {most}"
        raise ContextLengthError(limits.max_model_len, f"{however}. Please reduce the length of the {param}", param)
    return token_ids

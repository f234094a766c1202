"""Handlers of endpoints that use a model: from a validated body to a running generation.

Holds what a router process has once: its models, by every name, and the worker table. `app` adds its routes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.text.chat_template import NEW_ANSWER
from common.text.tokenizer import Tokenizer
from common.wings import call_wing, from_wing
from protos import types_pb2 as pb
from router.api.prompts import chat_prompt
from router.api.render import Details, Renderer, RenderOptions
from router.api.schemas import ChatCompletionBody, GenerationBody
from router.api.text import TextRules
from router.choice import Choice
from router.config import HttpConfig, RouterConfig
from router.features import CHAT_BODY, Features, truncated
from router.http.answer import GenerationResponse
from router.http.body import parse_body, read_json_object
from router.http.errors import FIELD_NAMES, REQUEST_ID, ModelNotFoundError
from router.journal import Journal
from router.request import GenerationRequest
from router.served_model import ServedModel
from router.workers.workers import WorkerTable

FEATURES: type[Features] = from_wing("router.answers.features:AnswerFeatures") or Features
ALIASES = ("mini-infer", "default")  # names of the first model, unless another one has them
SERVED_MODEL = "router.served_model"  # key of the model in the scope of a request, once it is known
MAX_LABEL_CHARS = 128
RendererOf = Callable[[Features, RenderOptions, Tokenizer], Renderer]
# Adds tracing to a response, from the headers, the model's name and the request.
Traced = Callable[[Mapping[str, str], str, GenerationRequest, Response], Response]


class Gateway:
    """The state of one router. The event loop that serves starts and stops its workers."""

    def __init__(self, config: RouterConfig, models: Sequence[ServedModel], http: HttpConfig | None = None) -> None:
        """models: the first is the default one; adapters come with their base models."""
        self.config = config
        self.http = http or HttpConfig()
        self.memory: dict[str, Callable[[], int]] = {}  # bytes that wings keep, by name, for GET /v1/cluster
        self.models = [*models]
        self.base_models = [model for model in models if not model.adapter]
        kind_of_table = from_wing("router.several_models.worker_table:ModelsTable") or WorkerTable
        self.workers: WorkerTable = kind_of_table(config, [model.workers for model in self.base_models])
        self.by_name: dict[str | None, ServedModel] = dict.fromkeys((None, *ALIASES), models[0])
        self.by_name |= {name: model for model in models for name in (model.name, *model.aliases)}
        self._traced: Traced | None = call_wing("router.tracing.open_tracing:open_tracing", config)

    # -- models ------------------------------------------------------------------------------------------------

    def model(self, name: str | None) -> ServedModel:
        """Look up a model by the name that clients use. Raises ModelNotFoundError."""
        model = self.by_name.get(name)
        if model is None:
            known = ", ".join(repr(model.name) for model in self.models)
            raise ModelNotFoundError(f"no model {str(name)[:64]!r}; this server has {known}")
        return model

    def metrics_text(self) -> bytes:
        """Render the metrics of all models for a scrape."""
        for model in self.base_models:
            model.metrics.read(model.workers, model.dispatcher.open_choices)
        return self.models[0].metrics.render()

    def refused(self, scope: MutableMapping[str, Any], status: int) -> None:
        """Count a refused request for its model, or for the first model if it is not known yet."""
        model: ServedModel = scope.get(SERVED_MODEL, self.models[0])
        model.metrics.refused(status)

    def model_for(self, http: Request, name: str | None) -> ServedModel:
        """Look up the model of a request, whose metrics then count a refusal. Raises ModelNotFoundError."""
        model = http.scope[SERVED_MODEL] = self.model(name)
        return model

    # -- generation --------------------------------------------------------------------------------------------

    def timeout_seconds(self, http: Request, is_stream: bool) -> float:
        """Return the seconds after which a request ends. Raises InvalidRequestError for a malformed header."""
        bound_seconds = self.config.request_timeout_seconds
        asked = call_wing("router.client_timeouts.headers:timeout_seconds", http.headers, is_stream, bound_seconds)
        return bound_seconds if asked is None else asked

    async def chat_completions(self, http: Request) -> Response:
        arrival = time.monotonic()
        body = parse_body(CHAT_BODY, await read_json_object(http), http.scope)
        return await self.chat(http, body, arrival, FEATURES.renderer)

    async def chat(
        self, http: Request, body: ChatCompletionBody, arrival: float, renderer_of: RendererOf
    ) -> Response:
        """Answer a conversation in the JSON of the API whose renderer is given."""
        model = self.model_for(http, body.model)
        model.dispatcher.admit()
        n: int = call_wing("router.several_choices.fields:num_choices", body) or 1
        features = await self.features(http, model, body, n)
        token_ids = await self.prompt_ids(model, body, features)
        prompts = truncated(body, model.limits(), [token_ids])
        request = self.request(http, model, body, features, prompts, n, arrival)
        details = call_wing("router.answer_details.details:details_of", body, model.tokenizer, prompts[0])
        options = self.options(request, model, body, details or Details())
        return self.respond(http, request, renderer_of(features, options, model.tokenizer), bool(body.stream))

    async def features(self, http: Request, model: ServedModel, body: GenerationBody, num_choices: int) -> Features:
        """Read the features that a request asks for."""
        features = await FEATURES.of(body, num_choices, model.tokenizer, self.config, http.scope)
        http.scope.setdefault(FIELD_NAMES, []).insert(0, features.client_field)
        return features

    async def prompt_ids(self, model: ServedModel, body: ChatCompletionBody, features: Features) -> list[int]:
        """Return the token ids of a conversation."""
        use = call_wing("router.template_options.fields:use_for", body) or NEW_ANSWER
        return await chat_prompt(body.messages, model.tokenizer, model.limits(), use, features.tools)

    def request(
        self,
        http: Request,
        model: ServedModel,
        body: GenerationBody,
        features: Features,
        prompts: Sequence[list[int]],
        per_prompt: int,
        arrival: float,
    ) -> GenerationRequest:
        """Make the request that `body` asks for, with `per_prompt` choices for each prompt and a new id."""
        request_id = http.scope[REQUEST_ID] = body.id_prefix + uuid.uuid4().hex
        rules = TextRules(
            continues=body.continues_prompt,
            skip_special=body.skip_special_tokens is not False,
            has_logprobs=(body.num_logprobs, body.num_prompt_logprobs) != (None, None),
            new_end=call_wing("router.stop_strings.stops:text_end_of", body),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            shows_stop_token=bool(body.include_stop_str_in_output),
            shows_nothing=body.max_tokens == 0,
        )
        timeout = self.timeout_seconds(http, bool(body.stream))
        shared = pb.Submit(priority=body.priority, adapter=model.adapter, cache_salt=body.cache_salt)
        session = http.headers.get("x-session-id", "")[:MAX_LABEL_CHARS] or body.session_id or body.user or ""
        choices: list[Choice] = []
        for token_ids in prompts:
            params = features.sampling(body, model.tokenizer, model.limits(), token_ids)
            for sampling in call_wing("router.several_choices.request:samplings", params, per_prompt) or [params]:
                index = len(choices)
                journal = Journal(
                    choice_id=f"{request_id}-{index}",
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    deadline=arrival + timeout,
                    arrival=arrival,
                    request=shared,
                    session=session,
                )
                text = features.text(model.tokenizer, rules, token_ids)
                choices.append(Choice(index, journal, text, model.dispatcher))
        request = GenerationRequest(request_id, choices, model.metrics)
        if per_prompt > 1:
            kind_of_request = from_wing("router.several_choices.request:SeveralChoices")
            request = kind_of_request(request_id, choices, model.metrics, per_prompt)
        return request

    def options(
        self, request: GenerationRequest, model: ServedModel, body: GenerationBody, details: Details
    ) -> RenderOptions:
        """Return the options for rendering an answer."""
        stream = body.stream_options
        return RenderOptions(
            request_id=request.request_id,
            model=body.model or model.name,
            created=int(time.time()),
            include_usage=bool(stream and stream.include_usage),
            continuous_usage=bool(stream and stream.continuous_usage_stats),
            details=details,
        )

    def respond(self, http: Request, request: GenerationRequest, renderer: Renderer, is_stream: bool) -> Response:
        """Return the response of a request, which runs while the response is sent."""
        response = GenerationResponse(request, renderer, self.answer_headers(http), is_stream)
        if self._traced is None:
            return response
        return self._traced(http.headers, http.scope[SERVED_MODEL].name, request, response)

    @staticmethod
    def answer_headers(http: Request) -> dict[str, str]:
        """Return the headers of an answer that identify its request."""
        request_id = http.scope[REQUEST_ID]
        label = http.headers.get("x-request-id", "")
        is_shown = 0 < len(label) <= MAX_LABEL_CHARS and label.isascii() and label.isprintable()
        headers = {"x-request-id": label if is_shown else request_id, "x-mini-infer-id": request_id}
        return headers | (call_wing("router.foreign_fields.advice:header_of", http.scope) or {})

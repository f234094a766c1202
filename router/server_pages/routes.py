"""GET /healthz, /ping, /version, /load and /tokenizer_info, and /server_info with the project's settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import Response

from common import VERSION
from common.model_files import DRY_RUN_MODEL_NAME
from router.config import ROLES
from router.gateway import Gateway
from router.http.routes import Routes, json_response
from router.workers.worker_link import WorkerLink

SECRETS = frozenset({"api_key", "cluster_token"})


def add_server_pages(routes: Routes, gateway: Gateway) -> None:
    async def healthz(_: Request) -> Response:
        first = gateway.models[0]
        infos = first.workers.infos()
        cuda_graphs = all(info.cuda_graphs for info in infos) if infos else None
        return json_response(
            {
                "status": "ok",
                "model": first.name,
                "roles": _roles(first.workers.links),
                "quantization": infos[0].quantization if infos else None,
                "cuda_graphs": cuda_graphs,
                # The same under the names of the flags.
                "use_cuda_graph": cuda_graphs,
                "quant_mode": infos[0].quantization if infos else None,
                "dry": infos[0].model == DRY_RUN_MODEL_NAME if infos else None,
                "models": {model.name: _roles(model.workers.links) for model in gateway.base_models},
            }
        )

    async def ping(_: Request) -> Response:
        """Answer Amazon SageMaker's probe with an empty body."""
        is_ready = any(model.workers.usable("decode") for model in gateway.base_models)
        return Response(status_code=200 if is_ready else 503)

    async def version(_: Request) -> Response:
        return json_response({"version": VERSION})

    async def load(_: Request) -> Response:
        dispatchers = [model.dispatcher for model in gateway.base_models]
        return json_response({"server_load": sum(len(dispatcher.open_choices) for dispatcher in dispatchers)})

    async def server_info(_: Request) -> Response:
        config = {name: value for name, value in asdict(gateway.config).items() if name not in SECRETS}
        models = {
            model.name: [MessageToDict(info, preserving_proto_field_name=True) for info in model.workers.infos()]
            for model in gateway.base_models
        }
        return json_response({"version": VERSION, "config": config, "models": models})

    async def tokenizer_info(request: Request) -> Response:
        model = gateway.model_for(request, request.query_params.get("model"))
        tokenizer = model.tokenizer

        def text(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_text(token_id)

        info: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # whatever the files say: this class reads them
            "vocab_size": tokenizer.vocab_size,
            "bos_token": text(tokenizer.bos_id),
            "eos_token": text(next(iter(tokenizer.eos_token_ids), None)),
            "added_tokens_decoder": {
                str(token_id): {"content": content, "special": True}
                for content, token_id in sorted(tokenizer.special_id_of.items(), key=lambda item: item[1])
            },
            "model_max_length": model.limits().max_model_len,
            "chat_template": tokenizer.templates.get("default"),
        }
        return json_response(info)

    routes.open_paths |= {b"/healthz", b"/ping"}
    routes.add("GET", "/healthz", healthz, "what is served by how many workers")
    routes.add("GET", "/ping", ping, "200 while requests for any model can be served, without a body")
    routes.add("GET", "/version", version, "the router's version")
    routes.add("GET", "/load", load, "how many choices are open")
    routes.add("GET", "/server_info", server_info, "the router's settings and the facts that workers announce")
    told = "special tokens and chat template of a model"
    routes.add("GET", "/tokenizer_info", tokenizer_info, told, query={"model": ""})


def _roles(links: Sequence[WorkerLink]) -> dict[str, int]:
    """Number of attached workers of each role."""
    roles = Counter(link.role for link in links if link.info is not None)
    return {role: roles[role] for role in ROLES}

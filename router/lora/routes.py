"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and the adapters served from the start."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from common.errors import InvalidRequestError
from common.lora.modules import folder_of, parse_lora_modules
from router.gateway import Gateway
from router.http.body import parse_body, read_json_object
from router.http.routes import Routes
from router.lora.adapters import LoraAdapters
from router.lora.folder import AdapterFolder
from router.lora.schemas import LoadLoraAdapterBody, UnloadLoraAdapterBody
from router.lora.settings import LoraModuleSettings
from router.lora.watched import WatchedAdapters
from router.operators.access import check_operator


def add_lora_routes(routes: Routes, gateway: Gateway) -> None:
    """Add the routes, and serve adapters. Raises ConfigError if an adapter in the settings cannot be served."""
    adapters = LoraAdapters(gateway)
    settings = gateway.config.of(LoraModuleSettings)
    adapters.serve(parse_lora_modules(settings.lora_modules))
    if settings.lora_dir:
        watched = WatchedAdapters(adapters, AdapterFolder(folder_of(settings.lora_dir)))
        watched.serve()
        routes.tasks.append(watched.follow)

    async def load(request: Request) -> Response:
        check_operator(request, gateway.config.api_key, "loading adapters")
        body = parse_body(LoadLoraAdapterBody, await read_json_object(request))
        if not body.lora_path.startswith(("/", "~")):
            raise InvalidRequestError("lora_path must be the absolute path of a folder", "lora_path")
        await adapters.load(body.lora_name, folder_of(body.lora_path), body.base_model_name or "", body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        check_operator(request, gateway.config.api_key, "unloading adapters")
        body = parse_body(UnloadLoraAdapterBody, await read_json_object(request))
        await adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    routes.add("POST", "/v1/load_lora_adapter", load, "serve a LoRA adapter as a model", LoadLoraAdapterBody)
    routes.add("POST", "/v1/unload_lora_adapter", unload, "serve it no longer", UnloadLoraAdapterBody)

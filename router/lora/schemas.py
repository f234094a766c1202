"""Bodies of the routes that load and unload adapters, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.api.schemas import Body, Label

MAX_PATH_CHARS = 4096


class LoadLoraAdapterBody(Body):
    """lora_path: a folder, which must have this path on the machines of the router and of all workers."""

    lora_name: Annotated[Label, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
    base_model_name: Label | None = None
    load_inplace: bool = False


class UnloadLoraAdapterBody(Body):
    lora_name: Annotated[Label, Field(min_length=1)]

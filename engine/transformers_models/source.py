"""Opening of a directory whose model runs by transformers' code, and reading of its weights."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from common.errors import ConfigError, UnsupportedModelError
from common.model_files import ModelFiles
from engine.config import EngineConfig
from engine.dummy_weights.settings import DummySettings
from engine.layers.weights import ShapeRecorder, WeightSource
from engine.loader.random_weights import SEED
from engine.loader.safetensors import weight_files
from engine.models.config import ModelConfig
from engine.models.families import family_of
from engine.models.hf_config import architecture_of, is_causal, read_hf_config
from engine.models.model import Model, OnBlock
from engine.models.registry import ModelFamily
from engine.transformers_models.isolation import check_isolation
from engine.transformers_models.layers import (
    build,
    check_architecture,
    find_layers,
    model_config,
    read_config,
    without_padding,
)  # fmt: skip
from engine.transformers_models.model import CausalLm, model_of
from engine.transformers_models.seam import NAME, Layer, require_transformers
from engine.transformers_models.settings import TransformersSettings

logger = logging.getLogger(__name__)
FLAG = "--model-impl transformers"
Opened = tuple[ModelConfig, ModelFamily, WeightSource, None, dict[str, Any], list[Path]]
"""Fields of a `Source`, whose weights are not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersFamily(ModelFamily):
    """A model whose weights transformers reads, by its own names. directory: None for random ones."""

    transformers: Any
    hf_config: Any
    layers: tuple[Layer, ...]
    directory: Path | None
    dtype: torch.dtype

    def build(self, config: ModelConfig, weights: WeightSource, on_block: OnBlock | None = None) -> Model:
        """See ModelFamily: nothing is taken from `weights`. Raises ConfigError, UnsupportedModelError."""
        if self.directory is None:
            torch.manual_seed(SEED)
            hf = build(self.transformers, self.hf_config, dtype=self.dtype)
        else:
            hf = read_model(self.transformers, self.hf_config, self.directory, self.dtype)
        logger.info("%s runs by the code of transformers %s", config.architecture, self.transformers.__version__)
        check_isolation(hf, config.vocab_size, config.max_position_embeddings)
        return model_of(config, CausalLm(hf, self.layers))

    def skeleton(self, config: ModelConfig) -> tuple[Model, dict[str, tuple[int, ...]]]:
        """See ModelFamily."""
        with torch.device("meta"):
            hf = build(self.transformers, self.hf_config, dtype=self.dtype)
            return model_of(config, CausalLm(hf, self.layers)), {}


def open_transformers(
    files: ModelFiles, engine_config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Opened | None:
    """What a `Source` is made of, if the model runs by transformers' code; None: by ours.

    Raises ConfigError and UnsupportedModelError.
    """
    is_asked = engine_config.of(TransformersSettings).model_impl == "transformers"
    if files.kind != "directory":
        if is_asked:
            raise ConfigError(f"{FLAG} needs a directory with config.json and safetensors, not {files.name}")
        return None
    raw = read_hf_config(files.path)
    architecture = architecture_of(raw)
    missing = None if is_asked else own_refusal(engine_config, architecture)
    if missing is None and not is_asked:
        return None
    try:
        transformers = require_transformers(FLAG)
        return _open(transformers, files.path, raw, engine_config, dtype, device)
    except (ConfigError, UnsupportedModelError) as error:
        if missing is not None:
            raise UnsupportedModelError(f"{missing}; nor by transformers' code: {error}") from error
        if isinstance(error, UnsupportedModelError):
            raise UnsupportedModelError(f"{FLAG}: {architecture} is not supported: {error}") from error
        raise


def own_refusal(engine_config: EngineConfig, architecture: str) -> UnsupportedModelError | None:
    """Why our own code does not run the model; None: it does, or has to say so itself."""
    if engine_config.of(TransformersSettings).model_impl == "mini-infer":
        return None
    try:
        family_of(architecture)
    except UnsupportedModelError as error:
        return error
    return None


def _open(
    transformers: Any, directory: Path, raw: dict[str, Any], engine_config: EngineConfig, dtype: torch.dtype,
    device: torch.device,
) -> Opened:  # fmt: skip
    asked: dict[str, Any] = {"model_impl": "transformers"}
    replace(engine_config, **asked)  # raises for settings that exclude it
    if device.type != "cpu":
        raise UnsupportedModelError("transformers' code runs on CPUs alone here: use --device cpu")
    if raw.get("quantization_config") or raw.get("compression_config"):
        raise UnsupportedModelError("quantized checkpoints are read by our own families alone")
    if not is_causal(raw):
        raise UnsupportedModelError("attention to later tokens is computed by our own families alone")
    hf_config = read_config(transformers, directory)
    architecture = architecture_of(raw)
    check_architecture(transformers, hf_config, architecture)
    layers = find_layers(transformers, hf_config)
    config = model_config(raw, hf_config, layers, engine_config.max_model_len)
    is_random = engine_config.of(DummySettings).load_format == "dummy"
    family = TransformersFamily(
        architecture=architecture, adapt_config=lambda config, raw: config, parts=lambda config, weights: iter(()),
        transformers=transformers, hf_config=hf_config, layers=layers, directory=None if is_random else directory,
        dtype=dtype,
    )  # fmt: skip
    identity = {"model_impl": "transformers", "hf_config": hf_config.to_dict(), "random": SEED if is_random else None}
    return config, family, ShapeRecorder(), None, identity, [] if is_random else weight_files(directory)


def read_model(transformers: Any, hf_config: Any, directory: Path, dtype: torch.dtype) -> Any:
    """The model with the directory's weights. Raises ConfigError if they are not exactly those that it needs."""
    transformers.utils.logging.disable_progress_bar()
    try:
        hf, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory, config=copy.deepcopy(hf_config), dtype=dtype, attn_implementation=NAME, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"the weights of {directory.name} cannot be read: {error}") from error
    wrong = {title: sorted(map(str, found[f"{title}_keys"])) for title in ("missing", "unexpected", "mismatched")}
    problems = [f"{title}: {', '.join(names[:5])}" for title, names in wrong.items() if names]
    if problems:
        raise ConfigError("the weights do not fit the model's config; " + "; ".join(problems))
    return without_padding(hf.eval())

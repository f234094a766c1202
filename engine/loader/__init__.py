"""Reading models: safetensors, GGUF and random weights. `load_model` is the way in."""

from engine.loader.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]

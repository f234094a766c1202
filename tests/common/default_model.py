"""The default model's tokenizer, read once for all tests of a process: it takes a quarter of a second."""

from __future__ import annotations

from functools import cache

import common.gguf  # noqa: F401 - it is in such a file
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.text.tokenizer import Tokenizer


@cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(""))

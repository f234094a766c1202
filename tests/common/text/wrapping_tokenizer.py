"""A tokenizer that puts special tokens around a text, as those of embedding models do."""

from __future__ import annotations

import tokenizers
from tokenizers.processors import TemplateProcessing

from common.text.tokenizer import Tokenizer
from tests.harness.router import DRY_RUN

BOS, EOS = 256, 257


def wrapping_tokenizer() -> Tokenizer:
    """Make the dry run's tokenizer with BOS before a text and EOS after it."""
    backend = tokenizers.Tokenizer.from_str(DRY_RUN._backend.to_str())
    backend.post_processor = TemplateProcessing("<bos> $A <eos>", None, [("<bos>", BOS), ("<eos>", EOS)])
    return Tokenizer(backend, bos_id=BOS, eos_token_ids=[EOS], templates={}, vocab_size=DRY_RUN.vocab_size)

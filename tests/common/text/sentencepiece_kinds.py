"""Small tokenizers of the kinds that SentencePiece models are converted to, with added tokens as published ones."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
_TEXTS = ["the cat and the hat", "def f(x):\n    return x  # a comment", "<|user|>\n[INST] hi there [/INST]"]


def bpe_with_byte_fallback(kind: str) -> Tokenizer:
    """Return a tokenizer as Llama-2's (`llama`), Gemma's (`gemma`) or Mistral's newer ones (`metaspace`)."""
    backend = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        before = [normalizers.Prepend("▁")] if kind == "llama" else []
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(steps if kind == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    trained = [*SPECIAL, "▁▁", "▁▁▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=len(trained) + 80, special_tokens=trained, show_progress=False)
    backend.train_from_iterator(_TEXTS, trainer)
    written = json.loads(backend.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in SPECIAL]
    backend = Tokenizer.from_str(json.dumps(written))
    if kind == "gemma":
        backend.add_tokens([AddedToken(run, special=False, normalized=False) for run in ("▁▁", "▁▁▁▁")])
    return backend

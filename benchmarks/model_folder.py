"""Folders to serve: `benchmarks/configs` with the tokenizer that a server needs, and EAGLE-3 heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

DRAFT_VOCAB = 32_000  # as in heads for Llama 3.1 8B and Qwen3 8B
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_tokenizer(flags: Sequence[str], folder: Path) -> tuple[list[str], int]:
    """Return the flags of `serve`, where a model folder without a tokenizer is replaced, and its vocabulary size.

    The replacement in `folder` has the same configuration and a tokenizer of as many tokens: bytes, then words w256x,
    w257x, ... Every token has text, so each is a chunk of a stream. Only for --load-format dummy. Other models stay
    unchanged, with the number 0, as for `PromptMaker`.
    """
    found = list(flags)
    for index, flag in enumerate(found):
        name, has_value, value = flag.partition("=")
        if name != "--model":
            continue
        source = Path(value if has_value else found[index + 1])
        if source.is_dir() and not (source / "tokenizer.json").exists():
            found[index : index + (1 if has_value else 2)] = [f"--model={folder / source.name}"]
            return found, _write(source, folder / source.name)
    return found, 0


def _write(source: Path, folder: Path) -> int:
    """Write the folder; return the number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", folder)
    vocab = {text: token_id for token_id, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    size: int = json.loads((source / "config.json").read_text())["vocab_size"]
    vocab |= {f"w{token_id}x": token_id for token_id in range(len(vocab), size)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return size


def write_random_head(model: ModelConfig, folder: Path) -> Path:
    """Write an EAGLE-3 head for the model, in the published layout, with the sizes of its attention and MLP."""
    import torch  # most users of this module do without torch
    from safetensors.torch import save_file

    hidden, inner, draft_vocab = model.hidden_size, model.intermediate_size, min(DRAFT_VOCAB, model.vocab_size)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": 1, "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "intermediate_size": inner, "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings, "vocab_size": model.vocab_size,
        "draft_vocab_size": draft_vocab, "hidden_act": "silu",
    }  # fmt: skip
    shapes = {
        "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (model.q_size, 2 * hidden),
        "midlayer.self_attn.k_proj": (model.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (model.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, model.q_size), "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab, hidden), "midlayer.input_layernorm": (hidden,), "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,), "norm": (hidden,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder

"""Model shapes that can be served: `benchmarks/configs` have no tokenizer, and a server needs one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_tokenizer(flags: Sequence[str], folder: Path) -> tuple[list[str], int]:
    """The flags of `serve`, with --model=PATH instead of a model folder without a tokenizer, and its vocabulary size.

    There, in `folder`, is the same configuration and a tokenizer of as many tokens: bytes, then words w256x, w257x,
    ... Every token has text, so that every token is a chunk of a stream. Only for --load-format dummy. Other models
    stay as they are, and the number is 0, as `PromptMaker` takes it.
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
    """Returns the number of tokens."""
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

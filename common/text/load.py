"""Loads a model's tokenizer: from a Hugging Face directory, a GGUF file, or none (`dry-run`: a token per byte)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from common.errors import UnsupportedModelError
from common.model_files import ModelFiles
from common.text.tokenizer import Tokenizer, byte_level_alphabet

MAX_FILE_BYTES = 256 << 20
DRY_RUN_VOCAB_SIZE = 320
_DRY_RUN_SPECIAL = ("<bos>", "<eos>", "<user>", "<assistant>")  # ids 256 to 259
_DRY_RUN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<assistant>' if message['role'] == 'assistant' else '<user>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model. Raises UnsupportedModelError for a missing or unknown one."""
    if files.kind == "dry-run":
        return _dry_run_tokenizer()
    if files.kind == "gguf":
        from common.gguf.load_tokenizer import tokenizer_of_file

        return tokenizer_of_file(files.path)
    return _from_directory(files.path)


def _dry_run_tokenizer() -> Tokenizer:
    alphabet = byte_level_alphabet()
    backend = Backend(BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _DRY_RUN_SPECIAL])
    return Tokenizer(
        backend,
        bos_id=256,
        eos_token_ids=[257],
        templates={"default": _DRY_RUN_TEMPLATE},
        vocab_size=DRY_RUN_VOCAB_SIZE,
    )


def _from_directory(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{folder.name} has no tokenizer.json")
    try:
        backend = Backend.from_str(_read_text(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a file it cannot parse
        raise UnsupportedModelError(f"{path} is not a readable tokenizer: {error}") from None
    # Of older models only special_tokens_map.json names the special tokens.
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[key] = text
    eos_ids = generation.get("eos_token_id", [])
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids or [])
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if eos is not None:
        eos_ids = [eos, *eos_ids]
    bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    is_llamas = str(config.get("tokenizer_class")).startswith("LlamaTokenizer")
    if is_llamas and config.get("add_bos_token") and bos_id is not None and bos_id not in backend.encode("a").ids:
        # DeepSeek's tokenizer.json adds none; transformers 4 and llama.cpp do as these fields say.
        special_tokens = [(named["bos_token"], bos_id)]
        backend.post_processor = processors.TemplateProcessing([named["bos_token"], "$A"], None, special_tokens)
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_token_ids=eos_ids,
        templates=_directory_templates(folder, config),
        named_tokens=named,
    )


def _directory_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the templates from all files of a directory that may hold some, in rising priority."""
    templates: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        templates |= {item["name"]: item["template"] for item in declared}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    return templates


def _read_text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UnsupportedModelError(f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MB")
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}

"""One tokenizer for every service: encode, decode, chat template, token bytes, and a hash to compare.

Built from a Hugging Face directory, a GGUF file, or nothing (`dry-run`: one token per byte), over the
`tokenizers` package. Special tokens come out of text only where the caller says that the text is its own
(`allow_special`) or where a chat template put them. Calls chat_template for rendering.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from common.errors import InvalidRequestError, UnsupportedModelError
from common.gguf_header import read_gguf_header
from common.model_files import ModelFiles
from common.text.chat_template import ChatTemplate
from common.text.detokenizer import Detokenizer, TokenTable
from common.text.gguf_tokenizer import backend_from_metadata

MAX_FILE_BYTES = 256 << 20
DRY_RUN_VOCAB_SIZE = 320
_DRY_RUN_SPECIAL = ("<bos>", "<eos>", "<user>", "<assistant>")  # ids 256 to 259
_DRY_RUN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<assistant>' if message['role'] == 'assistant' else '<user>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


class Tokenizer:
    """Encode and decode for one model. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_token_ids: Sequence[int],
        templates: Mapping[str, str],
        vocab_size: int = 0,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._plain: Backend | None = None  # the same without special tokens in text; made when needed
        self._plain_lock = threading.Lock()
        added = backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.vocab_size: int = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        self.special_ids = frozenset(special)
        self._special_id_of = {text: token_id for token_id, text in special.items()}
        longest_first = sorted(special.values(), key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None
        names = dict(named_tokens or {})
        names.setdefault("bos_token", self.token_text(bos_id) if bos_id is not None else "")
        names.setdefault("eos_token", self.token_text(eos_token_ids[0]) if eos_token_ids else "")
        self._templates = {name: ChatTemplate(text, names, longest_first) for name, text in templates.items()}
        self.table = TokenTable(self.vocab_size, self._piece_bytes_function(), self.special_ids, self._strips_space())
        self._hash = ""

    def encode(self, text: str, add_special_tokens: bool = False, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: what the model wants around a text (often a beginning-of-sequence token).
        allow_special: special tokens' texts become those tokens; else they are text like any other.
        """
        safe = allow_special or self._special_pattern is None or not self._special_pattern.search(text)
        backend = self._backend if safe else self._without_special()
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of whole sequences; U+FFFD for what is not UTF-8."""
        detokenizer = Detokenizer(self.table, skip_special)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation. Special tokens in them are the template's own, never a message's.

        variables: of the template, beside those that all have.
        Raises InvalidRequestError when there is no template or it cannot be applied.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
            )
        text, breaker = template.render(messages, tools, add_generation_prompt, continue_final_message, variables)
        if not breaker:
            return self.encode(text, allow_special=True)
        assert self._special_pattern is not None  # nothing is broken up where nothing is special
        plain = self._without_special()
        token_ids: list[int] = []
        for index, piece in enumerate(self._special_pattern.split(text)):
            if index % 2:
                token_ids.append(self._special_id_of[piece])
            elif piece:
                token_ids += plain.encode(piece.replace(breaker, ""), add_special_tokens=False).ids
        return token_ids

    def detokenizer(self, skip_special: bool = True, continues: bool = False) -> Detokenizer:
        """An incremental decoder for one new sequence."""
        return Detokenizer(self.table, skip_special, continues)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that has none."""
        return self._backend.id_to_token(token_id) or ""

    def tokenizer_hash(self) -> str:
        """SHA-256 over all tokens with their ids and over the end-of-sequence ids."""
        if not self._hash:
            vocab = sorted((token_id, text) for text, token_id in self._backend.get_vocab().items())
            digest = hashlib.sha256(repr((self.bos_id, self.eos_token_ids)).encode())
            digest.update("\0".join(f"{token_id}\1{text}" for token_id, text in vocab).encode())
            self._hash = digest.hexdigest()
        return self._hash

    def _without_special(self) -> Backend:
        with self._plain_lock:
            if self._plain is None:
                self._plain = Backend.from_str(self._backend.to_str())
                self._plain.encode_special_tokens = True
            return self._plain

    def _strips_space(self) -> bool:
        return not isinstance(self._backend.decoder, decoders.ByteLevel)

    def _piece_bytes_function(self) -> Any:
        """Function from token id to the token's bytes. Raises UnsupportedModelError for unknown kinds of decoder."""
        to_text = self._backend.id_to_token
        added = frozenset(self._backend.get_added_tokens_decoder())
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            alphabet = byte_level_alphabet()

            def byte_level(token_id: int) -> bytes | None:
                text = to_text(token_id)
                if text is None:
                    return None
                if all(char in alphabet for char in text):
                    return bytes(alphabet[char] for char in text)
                return text.encode()

            return byte_level
        if "▁" in repr(self._backend.decoder):

            def sentencepiece(token_id: int) -> bytes | None:
                text = to_text(token_id)
                if text is None:
                    return None
                if token_id not in added and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
                    return bytes([int(text[3:5], 16)])
                return (text if token_id in added else text.replace("▁", " ")).encode()

            return sentencepiece
        raise UnsupportedModelError(
            f"the tokenizer's decoder ({type(self._backend.decoder).__name__}) is neither byte-level "
            "nor SentencePiece"
        )


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. Raises UnsupportedModelError when there is none that is known here."""
    if files.kind == "dry-run":
        return _dry_run_tokenizer()
    if files.kind == "gguf":
        return _from_gguf(files.path)
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


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    backend = backend_from_metadata(metadata)
    eos_ids = [
        metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        if isinstance(metadata.get(key), int)
    ]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_ids,
        templates={"default": template} if isinstance(template, str) else {},
    )


def _from_directory(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{folder.name} has no tokenizer.json")
    try:
        backend = Backend.from_str(_read_text(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a file it cannot parse
        raise UnsupportedModelError(f"{path} is not a readable tokenizer: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
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
    return Tokenizer(
        backend,
        bos_id=backend.token_to_id(named["bos_token"]) if "bos_token" in named else None,
        eos_token_ids=eos_ids,
        templates=_directory_templates(folder, config),
        named_tokens=named,
    )


def _directory_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of a directory that may hold templates, in rising priority."""
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

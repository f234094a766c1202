"""The tokenizer of all services: encode, decode, chat template, token bytes, and a hash to compare.

Text becomes special tokens only if the caller trusts it (`allow_special`) or a chat template wrote it. Wraps the
`tokenizers` package; `common.text.load` loads one from a model's files.
"""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from common.errors import InvalidRequestError, UnsupportedModelError
from common.text.chat_template import NEW_ANSWER, NO_TEXT, ChatTemplate, TemplateUse
from common.text.detokenizer import Detokenizer, TokenTable

_SPACE_AT_START = '"prepend_scheme":"first"'


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
        # Made when needed: find no special tokens in a text, and in what follows a special token.
        self._plain: tuple[Backend, Backend] | None = None
        self._plain_lock = threading.Lock()
        added = backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        # Special tokens that take the white space before them, and after them.
        self._strips_left = frozenset(token.content for token in added.values() if token.lstrip)
        self._strips_right = frozenset(token.content for token in added.values() if token.rstrip)
        self.vocab_size: int = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        self.special_ids = frozenset(special)
        self.special_id_of = {text: token_id for token_id, text in special.items()}
        longest_first = sorted(special.values(), key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or NO_TEXT})")
        names = dict(named_tokens or {})
        names.setdefault("bos_token", self.token_text(bos_id) if bos_id is not None else "")
        names.setdefault("eos_token", self.token_text(eos_token_ids[0]) if eos_token_ids else "")
        self._template_names, self._longest_first = names, longest_first
        self._use_templates(templates)
        self._tables: dict[frozenset[int], TokenTable] = {}  # by the special tokens whose texts they show
        self.table = self._table_showing(frozenset())
        self._hash = ""

    def encode(self, text: str, add_special_tokens: bool = False, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        add_special_tokens: add the model's tokens around a text (often a beginning-of-sequence token).
        allow_special: texts of special tokens become those tokens; otherwise they are plain text.
        """
        safe = allow_special or not self._special_pattern.search(text)
        backend = self._backend if safe else self._without_special()
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of a whole sequence; U+FFFD replaces bytes that are not UTF-8."""
        detokenizer = Detokenizer(self.table, skip_special)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        use: TemplateUse = NEW_ANSWER,
    ) -> list[int]:
        """Return the token ids of the conversation. Only the template can write special tokens, no message can.

        Raises InvalidRequestError when there is no template or it cannot be applied.
        """
        template = self._template(bool(tools))
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
            )
        text, breaker = template.render(messages, tools, use)
        if not breaker:
            return self.encode(text, allow_special=True)
        token_ids: list[int] = []
        pieces = ["", *self._special_pattern.split(text), ""]  # texts have odd indices
        for index, piece in enumerate(pieces[1:-1], 1):
            if not index % 2:
                token_ids.append(self.special_id_of[piece])
                continue
            piece = piece.lstrip() if pieces[index - 1] in self._strips_right else piece
            piece = piece.rstrip() if pieces[index + 1] in self._strips_left else piece
            plain = self._without_special(is_start=index == 1)
            token_ids += plain.encode(piece.replace(breaker, ""), add_special_tokens=False).ids
        return token_ids

    def template_variables(self, has_tools: bool) -> frozenset[str]:
        """Return the variables that the chat template reads, for requests with or without tools."""
        template = self._template(has_tools)
        return frozenset() if template is None else template.variables

    def _template(self, has_tools: bool) -> ChatTemplate | None:
        template = self._templates.get("tool_use") if has_tools else None
        return template or self._templates.get("default")

    def with_templates(self, templates: Mapping[str, str]) -> Tokenizer:
        """Return a copy with other chat templates, by name. Raises UnsupportedModelError if one does not compile."""
        other = copy.copy(self)
        other._use_templates(templates)
        return other

    def _use_templates(self, templates: Mapping[str, str]) -> None:
        self.templates = dict(templates)  # source texts by name: `default`, and `tool_use` for requests with tools
        self.tool_template = templates.get("tool_use") or templates.get("default", "")
        self._templates = {
            name: ChatTemplate(text, self._template_names, self._longest_first) for name, text in templates.items()
        }

    def detokenizer(
        self, skip_special: bool = True, continues: bool = False, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a detokenizer for one new sequence. shown: special tokens whose texts are never skipped."""
        return Detokenizer(self._table_showing(shown), skip_special, continues)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the token's text in the vocabulary; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def vocabulary(self) -> dict[str, int]:
        """Return the vocabulary, added tokens included: token ids by the tokens' texts."""
        return dict(self._backend.get_vocab())

    def tokenizer_hash(self) -> str:
        """Compute SHA-256 over all tokens with their ids, and over the BOS and EOS ids."""
        if not self._hash:
            vocab = self._backend.get_vocab()
            by_id = sorted(zip(vocab.values(), vocab.keys(), strict=True))
            digest = hashlib.sha256(repr((self.bos_id, self.eos_token_ids)).encode())
            digest.update("\0".join(f"{token_id}\1{text}" for token_id, text in by_id).encode())
            self._hash = digest.hexdigest()
        return self._hash

    def _without_special(self, is_start: bool = True) -> Backend:
        """Return a backend that finds no special tokens. is_start: its texts are not what follows a special token."""
        with self._plain_lock:
            if self._plain is None:
                written = self._backend.to_str()
                start = inside = Backend.from_str(written)
                if _SPACE_AT_START in written:
                    inside = Backend.from_str(written.replace(_SPACE_AT_START, '"prepend_scheme":"never"'))
                start.encode_special_tokens = inside.encode_special_tokens = True
                self._plain = start, inside
            return self._plain[not is_start]

    def _table_showing(self, shown: frozenset[int]) -> TokenTable:
        table = self._tables.get(shown)
        if table is None:
            piece_bytes = self._piece_bytes_function()
            strips_space = self._backend.decoder.decode(["▁a"]) == "a"  # not Gemma's decoder, for one
            table = TokenTable(self.vocab_size, piece_bytes, self.special_ids - shown, strips_space)
            self._tables[shown] = table
        return table

    def _piece_bytes_function(self) -> Any:
        """Return the function from token id to bytes. Raises UnsupportedModelError for unknown kinds of decoder."""
        to_text = self._backend.id_to_token
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            byte_of = byte_level_alphabet().__getitem__

            def byte_level(token_id: int) -> bytes | None:
                text = to_text(token_id)
                if text is None:
                    return None
                try:
                    return bytes(map(byte_of, text))
                except KeyError:  # an added token, stored as plain text
                    return text.encode()

            return byte_level
        if "▁" in repr(self._backend.decoder):

            def sentencepiece(token_id: int) -> bytes | None:
                text = to_text(token_id)
                if text is None:
                    return None
                if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
                    return bytes([int(text[3:5], 16)])
                return text.replace("▁", " ").encode()  # of added tokens, too: Gemma's runs of spaces are some

            return sentencepiece
        raise UnsupportedModelError(
            f"the tokenizer's decoder ({type(self._backend.decoder).__name__}) is neither byte-level "
            "nor SentencePiece"
        )


def byte_level_alphabet() -> dict[str, int]:
    """Map each printable character of byte-level BPE to the byte that it stands for (GPT-2's table, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(unprintable)}

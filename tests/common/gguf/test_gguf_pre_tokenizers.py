"""Pieces of texts by pre-tokenizers, compared with transformers' for the names it knows, and with published ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from common.errors import UnsupportedModelError
from common.gguf.pre_tokenizers import cutting_of

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
OF_TRANSFORMERS = ["llama-bpe", "llama3", "llama-v3", "pixtral", "dbrx", "smaug-bpe", "tekken", "qwen2"]
OF_TRANSFORMERS += ["deepseek-r1-qwen", "gpt-4o", "llama4", "falcon3", "midm-2.0", "megrez", "kanana2"]
# As in DeepSeek-V3's tokenizer.json.
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
# Letters with and without case, marks, digits, punctuation, symbols and white space of several scripts.
ALPHABET = "aZ'sStlLéÉßǅʔλΣжЖ他們かナ한ა٣०5９Ⅷ.,/-!、。“”$+€😀\u0301\u200d _\t\r\n\u00a0\u3000"


def pieces(name: str, text: str) -> list[str]:
    return [text[first:last] for _, (first, last) in cutting_of(name).pre_tokenizer().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(ALPHABET, max_size=40))
def test_pieces_are_those_of_transformers(name: str, text: str) -> None:
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
    expected = pre_tokenizers.Sequence([split, BYTES]).pre_tokenize_str(text)
    assert cutting_of(name).pre_tokenizer().pre_tokenize_str(text) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(ALPHABET, max_size=40))
def test_pieces_of_deepseek_v3_are_those_of_its_tokenizer(text: str) -> None:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    published = json.loads(Tokenizer(BPE()).to_str())
    published["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            *({**split, "pattern": {"Regex": expression}} for expression in DEEPSEEK_V3),
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    backend = Tokenizer.from_str(json.dumps(published))
    assert backend.pre_tokenizer is not None
    assert cutting_of("deepseek-v3").pre_tokenizer().pre_tokenize_str(text) == backend.pre_tokenizer.pre_tokenize_str(
        text
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek-llm", "Hello World 12\n\n", ["Hello", " World", " ", "1", "2", "\n", "\n"]),
        ("deepseek-llm", "a, b。他們한글", ["a", ",", " b", "。", "他們한글"]),
        ("deepseek-llm", "Բառ բառ", ["Բ", "առ բառ"]),  # Armenian's small letters are not in its list
        ("deepseek-llm", "end  ", ["end", "  "]),
        ("kimi-k2", "HelloWorld's 1234 (a)/\n", ["Hello", "World's", " ", "123", "4", " (", "a", ")/\n"]),
        ("kimi-k2", "x他們です a中文b 한글", ["x", "他們", "です", " a", "中文", "b", " 한글"]),
        ("seed-coder", "Hello's 12 a;\n\n", ["Hello", "'s", " ", "1", "2", " a", ";", "\n\n"]),
        ("viking", "On 12, se. Ei!", ["On", " ", "1", "2", ",", " se", ".", " Ei", "!"]),
        ("refact", "x = 10's", ["x", " =", " ", "1", "0", "'s"]),
        ("gigachat", "x = 10's", ["x", " =", " 10", "'s"]),
        ("deepseek-coder", "if (x): 10", ["if", " (", "x", "):", " ", "1", "0"]),
        ("deepseek-coder", "Բառ բառ", ["Բառ", " բառ"]),
        ("deepseek-coder", "ბარი ქალი", ["ბარი", " ", "ქალი"]),
    ],
)
def test_pieces(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'unheard-of'.*deepseek-v3.*gpt-4o.*tekken"):
        cutting_of("unheard-of")

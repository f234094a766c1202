"""How byte-level tokenizers of GGUF files split a text before merging, by the names of `tokenizer.ggml.pre`.

A name stands for the expressions in one model's tokenizer.json, which later models share. The expressions are applied
in order, each to the pieces that the previous one left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from common.errors import UnsupportedModelError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_VIKING = (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"  # letters without case are in both


def _cased(after_word: str, digits: str, but: str = "", after_marks: str = r"\r\n/") -> str:
    """Return an expression that splits words between a small and a capital letter. but: excluded letters."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    words = (f"{before}{upper}*{lower}+{after_word}", f"{before}{upper}+{lower}*{after_word}")
    return "|".join([*words, digits, rf" ?[^\s\p{{L}}\p{{N}}]+[{after_marks}]*", _SPACES])


_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_KIMI = r"\p{Han}+|" + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", but=r"&&[^\p{Han}]", after_marks=r"\r\n")


# Letters with case, as DeepSeek's first tokenizers list them, without later additions to Unicode.
_CASED_LETTERS = (
    rb"A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373"
    rb"\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F"
    rb"\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77"
    rb"\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D"
    rb"\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4"
    rb"\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139"
    rb"\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D"
    rb"\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A"
    rb"\uFF41-\uFF5A\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2"
    rb"\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943"
).decode("unicode_escape")
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """splits: expressions whose matches become pieces, as does the text between them. ends_as_gpt2: GPT-2's
    expression comes last. whole_pieces: a piece that is a token is taken as one, whatever merges give. is_composed:
    characters are composed first (NFC). adds_bos: a text begins with the BOS token, unless the file says otherwise.
    """

    splits: tuple[str, ...] = ()
    ends_as_gpt2: bool = False
    whole_pieces: bool = False
    is_composed: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.ends_as_gpt2)
        return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(x), "isolated") for x in self.splits), bytes_of])


# Of models whose architecture is supported. Names that share expressions are listed together.
_KNOWN: dict[tuple[str, ...], Cutting] = {
    ("default", "gpt-2", "gigachat", "a.x-4.0", "trillion"): Cutting(ends_as_gpt2=True),
    ("smollm", "refact", "starcoder", "minerva-7b"): Cutting((r"\p{N}",), ends_as_gpt2=True),
    ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "midm-2.0"): Cutting(
        (_LLAMA3,), whole_pieces=True, adds_bos=True
    ),
    ("dbrx", "smaug-bpe"): Cutting((_LLAMA3,)),  # Phi-4's name is dbrx
    ("tekken",): Cutting((_cased("", r"\p{N}"),), whole_pieces=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2"): Cutting((_GPT4O,), whole_pieces=True),
    ("kimi-k2",): Cutting((_KIMI,), whole_pieces=True),
    ("qwen2", "deepseek-r1-qwen"): Cutting((_QWEN2,), is_composed=True),
    ("megrez",): Cutting((_QWEN2,)),
    ("seed-coder",): Cutting((_SEED,)),
    ("viking",): Cutting(_VIKING),
    ("deepseek-llm",): Cutting(_DEEPSEEK_LLM),
    ("deepseek-coder",): Cutting(_DEEPSEEK_CODER),
    ("deepseek-v3", "joyai-llm"): Cutting(_DEEPSEEK_V3),
}
_BY_NAME = {name: cutting for names, cutting in _KNOWN.items() for name in names}


def cutting_of(name: str) -> Cutting:
    """Return how the named tokenizer splits. Raises UnsupportedModelError, which lists the known names."""
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        raise UnsupportedModelError(f"GGUF pre-tokenizer {name!r} is not supported (known: {known})")
    return _BY_NAME[name]

"""How models write their reasoning: recognized from the chat template.

`reasoning_parser` splits a text by these formats. Knows nothing of tokens, requests or the API's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

Budget = tuple[int, frozenset[int]]  # most tokens of reasoning, and token ids that never occur in it
MAX_BLANKS = 4  # between reasoning and an answer that follows a grammar


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two markers, before the answer."""

    begin: str
    end: str
    is_channels: bool = False  # gpt-oss's harmony format: any number of messages, each with the name of its channel

    @property
    def markers(self) -> tuple[str, ...]:
        return CHANNEL_MARKERS if self.is_channels else (self.begin, self.end)


THINK = ReasoningFormat("<think>", "</think>")  # Qwen3, DeepSeek-R1, GLM-4.5 and most others
HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", is_channels=True)
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
RECIPIENT = "to=functions."  # of a message that is a call
MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>", START, CHANNEL)
CHANNEL_MARKERS = (MESSAGE, *MESSAGE_ENDS)
# By vLLM's parser names.
FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "glm45": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    "openai_gptoss": HARMONY,
}


def reasoning_format(template: str, parser: str = "auto") -> ReasoningFormat | None:
    """Return the format with that name, or for auto the one that a chat template's model writes.

    None: the model does not separate reasoning from answers, or `parser` is none.
    """
    if parser != "auto":
        return FORMATS.get(parser)
    if CHANNEL in template and MESSAGE in template:
        return HARMONY
    return next((each for each in FORMATS.values() if not each.is_channels and each.end in template), None)


def lark_before_answer(
    written: ReasoningFormat,
    is_open: bool,
    special: Mapping[str, int],
    budget: Budget | None = None,
    has_header: bool = False,
) -> str:
    """Return the Lark rule `before`: what may precede an answer that follows a grammar.

    is_open: the prompt has opened the reasoning. special: ids of markers that are special tokens; with a budget, of
    all markers. has_header: the answer includes the header of its channel.

    llguidance's `max_tokens` would also limit a text, but cannot take tokens back, which drafts need.
    """

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    if budget is not None:
        num_tokens, never = budget
        inside = f"<[^{','.join(map(str, sorted(never)))}]>{{0,{num_tokens}}} " if num_tokens else ""
        reasoning = f"reasoning: {inside}{marker(written.end)}"
    elif written.end in special:
        reasoning = f"reasoning: TEXT {marker(written.end)}\nTEXT: /(?s:.*)/"
    else:
        reasoning = f"reasoning[suffix={json.dumps(written.end)}]: /(?s:.*)/"
    if written.is_channels:
        analysis = f'{marker(CHANNEL)} "analysis" {marker(MESSAGE)} reasoning {marker(START)} "assistant"'
        header = "" if has_header else f'{marker(CHANNEL)} "final" {marker(MESSAGE)}'
        return f"before: ({analysis})? {header}\n{reasoning}"
    blanks = f"BLANKS: /[ \\n]{{0,{MAX_BLANKS}}}/"
    if is_open:
        return f"before: reasoning BLANKS\n{reasoning}\n{blanks}"
    # Lazy: otherwise an answer of any text could continue the marker.
    begin = f"begin{'' if written.begin in special else '[lazy]'}: {marker(written.begin)}"
    return f"before: (begin reasoning BLANKS)?\n{begin}\n{reasoning}\n{blanks}"


def marks(written: ReasoningFormat, is_open: bool, has_header: bool) -> tuple[str, str]:
    """Return what begins and ends the part that `lark_before_answer` allows; empty begin: it has begun, or always
    does."""
    if written.is_channels:
        return (written.begin.removesuffix(MESSAGE), written.end) if has_header else ("", f"{CHANNEL}final{MESSAGE}")
    return "" if is_open else written.begin, written.end


def lark_after_budget(
    written: ReasoningFormat, is_open: bool, special: Mapping[str, int], budget: Budget
) -> tuple[str, str]:
    """Return `before`, and Lark of an answer of any tokens after it except those that begin reasoning again.

    special: ids of all markers.
    """
    before = lark_before_answer(written, is_open, special, budget, has_header=True)
    if not written.is_channels:
        return before, f"start: <[^{special[written.begin]}]>*"
    channel = f"<[{special[CHANNEL]}]>"
    other = f'{channel} ("final" | "commentary") <[^{special[CHANNEL]}]>*'
    return before, f"start: ({other})+"

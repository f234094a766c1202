"""Separation of reasoning and answer in texts that are split anywhere."""

from __future__ import annotations

import pytest

from common.reasoning.reasoning_format import HARMONY, THINK, ReasoningFormat, reasoning_format
from common.reasoning.reasoning_parser import parser_for

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = OPENED + "\n</think>\n\n"
ANALYSIS = "<|channel|>analysis<|message|>Hm. 2 < 3.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."


def split(written: ReasoningFormat, prompt_end: str, text: str, size: int) -> tuple[str, str]:
    parser = parser_for(written, prompt_end)
    parts = [parser.push(text[start : start + size]) for start in range(0, len(text), size)] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("prompt_end", "text", "reasoning", "answer"),
    [
        ("assistant\n", "<think>\nHm. 2 < 3.\n\nSo?\n</think>\n\nYes.\n", "Hm. 2 < 3.\n\nSo?", "Yes.\n"),
        ("assistant\n", "\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("assistant\n", " Yes. <think> is a marker.", "", " Yes. <think> is a marker."),
        ("assistant\n", "<thin", "", "<thin"),
        ("assistant\n", "<think>\nHm. </thi\n", "Hm. </thi", ""),
        ("assistant\n", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (OPENED, "Hm.\n</think>\n\nYes. </think>", "Hm.", "Yes. </think>"),
        (OPENED, "Hm", "Hm", ""),
        (OPENED, "Hm.</think>\n", "Hm.", ""),
        (CLOSED, "<think> is a marker.", "", "<think> is a marker."),
        ("What is <think>?<|im_end|>\nassistant\n", "A marker.", "", "A marker."),
    ],
    ids=[
        "both", "blanks around", "marker in an answer", "cut marker", "cut reasoning", "empty reasoning", "begun",
        "begun and cut", "no answer", "turned off", "marker in a message",
    ],
)  # fmt: skip
def test_markers(prompt_end: str, text: str, reasoning: str, answer: str, size: int) -> None:
    assert split(THINK, prompt_end, text, size) == (reasoning, answer)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (ANALYSIS + FINAL, "Hm. 2 < 3.", "Yes."),
        (FINAL, "", "Yes."),
        (ANALYSIS + PREAMBLE + FINAL + "<|return|>", "Hm. 2 < 3.", "I look.Yes."),
        (ANALYSIS[:40], "Hm. 2 < 3.", ""),
        (ANALYSIS, "Hm. 2 < 3.", ""),
        (ANALYSIS[:20], "", ""),
        ("Plain, 2 <| 3", "", "Plain, 2 <| 3"),
        ("<|chan", "", "<|chan"),
    ],
    ids=["both", "final alone", "three messages", "cut text", "cut after a message", "cut header", "plain", "cut"],
)
def test_channels(text: str, reasoning: str, answer: str, size: int) -> None:
    assert split(HARMONY, "<|start|>assistant", text, size) == (reasoning, answer)


CALL = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>"
CALL_LATE = "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_message_to_a_function_keeps_its_recipient_where_calls_are_read(size: int) -> None:
    for call in (CALL, CALL_LATE):
        for has_tools, answer in ((True, "to=functions.get_time"), (False, "{}")):
            parser = parser_for(HARMONY, "", has_tools)
            text = ANALYSIS + call
            parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
            assert "".join(part[0] for part in parts) == "Hm. 2 < 3."
            assert "".join(part[1] for part in parts).startswith(answer)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (
            "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}",
            THINK,
        ),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", HARMONY),
        ("{{ '[THINK]' }}{{ '[/THINK]' }}", ReasoningFormat("[THINK]", "[/THINK]")),
        ("{{ '<|im_start|>assistant' }}", None),
    ],
)
def test_formats_are_recognized_from_templates(template: str, written: ReasoningFormat | None) -> None:
    assert reasoning_format(template) == written

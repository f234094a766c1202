"""How models write calls: recognized in templates, forced by grammars."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from common.grammar.grammar import check_grammar
from common.tools.tool_format import (
    HERMES,
    LLAMA3_JSON,
    calls_grammar,
    tool_format,
)
from tests.common.tools.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE

# -- templates -------------------------------------------------------------------------------------------------


def test_formats_are_recognized_from_templates() -> None:
    assert tool_format(HERMES_TEMPLATE) is HERMES
    assert tool_format(LLAMA3_TEMPLATE) is LLAMA3_JSON
    hermes2 = "{{ tools }}<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>"
    assert tool_format(hermes2) is HERMES


@pytest.mark.parametrize(
    "shown",
    [
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",  # GLM
        "<tool_call>\\n<function=example_function_name>\\n<parameter=p>",  # Qwen3-Coder
        "[TOOL_CALLS][{'name': name, 'arguments': arguments}]",  # Mistral
        "<｜tool▁calls▁begin｜>",  # DeepSeek
    ],
)
def test_other_formats_are_refused(shown: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read the calls") as refused:
        tool_format("{% if tools %}{{ tools }}" + shown + "{% endif %}")
    assert refused.value.param == "tools"


def test_a_template_without_tools_takes_none() -> None:
    with pytest.raises(InvalidRequestError, match="takes no tools"):
        tool_format("{% for message in messages %}<tool_call>{'name'{% endfor %}")


def test_a_schema_that_cannot_be_followed_is_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="not"):
        check_grammar(calls_grammar(HERMES, {"f": {"type": "object", "not": {}}}, True, {}))

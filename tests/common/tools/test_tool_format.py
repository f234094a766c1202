"""How models write calls: recognized in templates, forced by grammars."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from common.grammar.grammar import check_grammar
from common.tools.json_calls import HERMES, LLAMA3_JSON, MISTRAL_LIST
from common.tools.literal_calls import FUNCTION_GEMMA, PYTHONIC
from common.tools.named_calls import DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, KIMI_K2, MISTRAL_NAMED
from common.tools.tagged_calls import GLM, QWEN3_CODER
from common.tools.tool_format import calls_grammar, tool_format
from common.tools.tool_parser import ToolFormat
from tests.common.tools.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE

# -- templates -------------------------------------------------------------------------------------------------


def test_formats_are_recognized_from_templates() -> None:
    assert tool_format(HERMES_TEMPLATE) is HERMES
    assert tool_format(LLAMA3_TEMPLATE) is LLAMA3_JSON
    hermes2 = "{{ tools }}<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>"
    assert tool_format(hermes2) is HERMES


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>", GLM),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=p>", QWEN3_CODER),
        ("[TOOL_CALLS][{'name': name, 'arguments': arguments}]", MISTRAL_LIST),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", MISTRAL_NAMED),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
            DEEPSEEK_V3,
        ),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", DEEPSEEK_V31),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", KIMI_K2),
        ("'<start_function_call>call:' + name + '{'", FUNCTION_GEMMA),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", PYTHONIC),
        ("<|start|>assistant to=functions.x<|channel|>commentary json<|message|>", HARMONY),
    ],
)
def test_more_formats_are_recognized(shown: str, written: ToolFormat) -> None:
    assert tool_format("{% if tools %}{{ tools }}" + shown + "{% endif %}") is written


def test_other_formats_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot read the calls") as refused:
        tool_format("{% if tools %}{{ tools }}<function_call>{% endif %}")
    assert refused.value.param == "tools"


def test_a_template_without_tools_takes_none() -> None:
    with pytest.raises(InvalidRequestError, match="takes no tools"):
        tool_format("{% for message in messages %}<tool_call>{'name'{% endfor %}")


def test_a_schema_that_cannot_be_followed_is_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="not"):
        check_grammar(calls_grammar(HERMES, {"f": {"type": "object", "not": {}}}, True, {}))

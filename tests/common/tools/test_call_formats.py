"""Calls as each family of models writes them: one, several, in a text, cut, with markup inside, broken."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tools.json_calls import HERMES, LLAMA3_JSON, MISTRAL_LIST
from common.tools.literal_calls import FUNCTION_GEMMA, PYTHONIC
from common.tools.named_calls import DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, KIMI_K2, MISTRAL_NAMED
from common.tools.tagged_calls import GLM, QWEN3_CODER
from common.tools.tool_format import FORMATS
from common.tools.tool_parser import ToolCallParser, ToolFormat
from tests.common.tools.reading import FUNCTIONS, Call, in_pieces, parsed
from tests.common.tools.tool_templates import call_text

ARGUMENTS = '{"city": "Malmö \\"}{<", "days": 2}'
WEATHER, TIME = ("get_weather", ARGUMENTS), ("get_time", "{}")


def tagged(key: str, value: str, name: str = "get_weather") -> str:
    return f"<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{inside}</tool_call>"


def deepseek3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi(name: str, arguments: str, index: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def harmony(name: str, arguments: str) -> str:
    return f"to=functions.{name}<|message|>{arguments}"


def gemma(name: str, inside: str = "") -> str:
    return f"<start_function_call>call:{name}{{{inside}}}<end_function_call>"


def cut(text: str, at: str = "lmö") -> str:
    return text[: text.index(at)]


DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OBJECT = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
TIME_TAGS = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"

HERMES_WEATHER = "get_weather", '{"city": "</tool_call> \\"}{"}'
HERMES_TIME = "get_time", '{"zone": "é\\u00e9", "big": 123456789012345678901234567890}'
WEATHER_TEXT, TIME_TEXT = call_text(*HERMES_WEATHER), call_text(*HERMES_TIME)
LATE = f'{{"arguments": {{"city": "{"x" * 190}"}}, "name": "get_weather"}}'  # the name, without waiting for it
BARE, OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}', ("get_weather", '{"city": "Oslo"}')
HERMES_CASES: list[tuple[str, str, list[Call]]] = [
    (f"{WEATHER_TEXT}\n{TIME_TEXT}", "", [HERMES_WEATHER, HERMES_TIME]),
    (f"{WEATHER_TEXT}{TIME_TEXT}\n", "", [HERMES_WEATHER, HERMES_TIME]),
    (f"Let me look.\n\n{WEATHER_TEXT}", "Let me look.", [HERMES_WEATHER]),
    (f"{TIME_TEXT}\nDone.", "\nDone.", [HERMES_TIME]),
    (f"\n\n{TIME_TEXT}", "", [HERMES_TIME]),
    ('<tool_call>{"name":"get_time"}', "", [TIME]),  # without an end
    ('<tool_call>{"name":"get_time", "arguments": {}}\n</tool_', "", [TIME]),
    ('<tool_call>{"name":"get_time"}<tool_call>{"name":"get_time"}', "", [TIME, TIME]),
    (f"<tool_call> or {TIME_TEXT}", "<tool_call> or", [HERMES_TIME]),
    *((text, text, []) for text in (
        "", "plain", "ends with a <tool", " \n", "<tool_call>", "a <tool_call> b </tool_call>\n",
        "<tool_call>\n{'name': 'get_time'}\n</tool_call>", call_text("unknown", "{}"),
        '<tool_call>[{"name": "get_time"}]', '<tool_call>{"a": "\\', '<tool_call>{"name": ["get_time"]}',
        '<tool_call>\n{"name": "get_ti', '<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"name" "get_time"}',
    )),
    (BARE, "", [OSLO]),  # without their markers
    (f"\n{BARE}\n{BARE}\n", "", [OSLO, OSLO]),
    (f"{BARE}\nDone.", "\nDone.", [OSLO]),
    (f"```json\n{BARE}\n```", "", [OSLO]),
    (f"Here:\n```json\n{BARE}\n```\nand ```py\n1\n```", "Here:\nand ```py\n1\n```", [OSLO]),
    (f"<tools>\n{BARE}\n</tools>", "", [OSLO]),
    *((text, text, []) for text in (
        f"Say {BARE}", '{"name": "Ann", "age": 4}', '```json\n{"name": "Ann"}\n```', f"```python\n{BARE}\n```",
        "```json", LATE, f"```json\n{LATE}\n```",
    )),
]  # fmt: skip
LLAMA_TIME, A1 = '{"name": "get_time", "parameters": {"a": 1}}', ("get_time", '{"a": 1}')
LLAMA3_CASES: list[tuple[str, str, list[Call]]] = [  # a call is the answer itself
    (LLAMA_TIME, "", [A1]),
    ('\n{"name": "get_time", "arguments": {"a": 1}}\n', "", [A1]),
    (f'{LLAMA_TIME}; {{"name": "get_weather"}};', "", [A1, ("get_weather", "{}")]),
    (f"{LLAMA_TIME}\n{LLAMA_TIME}", "", [A1, A1]),
    (f"{LLAMA_TIME}; done", "; done", [A1]),
    (f'{LLAMA_TIME};{{"name": "unknown"}}', ';{"name": "unknown"}', [A1]),
    *((text, text, []) for text in (
        '{"answer": 1} ', '{"name": "unknown", "parameters": {}}', 'so: {"name": "get_time", "parameters": {}}',
        '{"name": "get_ti', " \n", "hello ", f";{LLAMA_TIME}",
    )),
]  # fmt: skip
CASES: list[tuple[ToolFormat, str, str, list[Call]]] = [
    *((HERMES, *case) for case in HERMES_CASES),
    *((LLAMA3_JSON, *case) for case in LLAMA3_CASES),
    (MISTRAL_LIST, f"[TOOL_CALLS][{OBJECT}]", "", [WEATHER]),
    (MISTRAL_LIST, f'[TOOL_CALLS] [{OBJECT}, {{"name": "get_time", "arguments": {{}}}}]', "", [WEATHER, TIME]),
    (MISTRAL_LIST, cut(f"I look. [TOOL_CALLS][{OBJECT}"), "I look.", [("get_weather", cut(ARGUMENTS))]),
    (MISTRAL_LIST, "[TOOL_CALLS] is a marker.", "[TOOL_CALLS] is a marker.", []),
    (MISTRAL_NAMED, f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "", [WEATHER]),
    (MISTRAL_NAMED, f"I look.[TOOL_CALLS]get_time[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "I look.",
     [TIME, WEATHER]),
    (MISTRAL_NAMED, "[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS]unknown[ARGS]{}", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]get_time[ARGS]", "", [TIME]),  # without arguments
    (MISTRAL_NAMED, f"[TOOL_CALLS]get_time[ARGS]\n[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "", [TIME, WEATHER]),
    (MISTRAL_NAMED, cut(f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"), "", [("get_weather", cut(ARGUMENTS))]),
    (MISTRAL_NAMED, "[TOOL_CALLS]get_time[ARGS]{[1}] So.", " So.", [("get_time", "{[1}]")]),  # broken
    (MISTRAL_NAMED, "[TOOL_CALLS]get_ti", "[TOOL_CALLS]get_ti", []),
    (DEEPSEEK_V3, f"{DEEPSEEK[0]}{deepseek3(*WEATHER)}\n{deepseek3(*TIME)}{DEEPSEEK[1]}", "", [WEATHER, TIME]),
    (DEEPSEEK_V3, cut(f"I look.\n{DEEPSEEK[0]}{deepseek3(*WEATHER)}"), "I look.",
     [("get_weather", cut(ARGUMENTS))]),
    (DEEPSEEK_V3, f"{DEEPSEEK[0]}{deepseek3('get_time', '[1}')}{DEEPSEEK[1]}", "", [("get_time", "[1}")]),  # broken
    (DEEPSEEK_V31, cut(f"{DEEPSEEK[0]}{deepseek31(*WEATHER)}"), "", [("get_weather", cut(ARGUMENTS))]),
    (DEEPSEEK_V31, f"{DEEPSEEK[0]}{deepseek31('get_time', '[1}')}{DEEPSEEK[1]}", "", [("get_time", "[1}")]),
    (DEEPSEEK_V31, f"{DEEPSEEK[0]}{deepseek31(*WEATHER)}{deepseek31(*TIME)}{DEEPSEEK[1]}", "", [WEATHER, TIME]),
    (DEEPSEEK_V31, f"{deepseek31(*TIME)} Done.", " Done.", [TIME]),
    (KIMI_K2, f"I look.{KIMI[0]}{kimi(*WEATHER)}{kimi(*TIME, 1)}{KIMI[1]}", "I look.", [WEATHER, TIME]),
    (KIMI_K2, f"{KIMI[0]}{kimi('get_time', '[1}')}{KIMI[1]}", "", [("get_time", "[1}")]),  # broken
    (KIMI_K2, cut(f"{KIMI[0]}{kimi(*WEATHER)}"), "", [("get_weather", cut(ARGUMENTS))]),
    (HARMONY, f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}", "", [WEATHER]),
    (HARMONY, f"I look.{harmony(*TIME)}{harmony(*WEATHER)}", "I look.", [TIME, WEATHER]),
    (HARMONY, f"{harmony(*TIME)} Done.", " Done.", [TIME]),
    (HARMONY, harmony("get_time", ""), "", [TIME]),  # without arguments
    (HARMONY, harmony("get_weather", '{"city": "to=functions.get_time<|message|>{"}'), "",
     [("get_weather", '{"city": "to=functions.get_time<|message|>{"}')]),
    (HARMONY, cut(harmony(*WEATHER)), "", [("get_weather", cut(ARGUMENTS))]),
    (HARMONY, harmony("get_time", "{[1}"), "", [("get_time", "{[1}")]),  # broken
    (HARMONY, harmony("unknown", "{}"), harmony("unknown", "{}"), []),
    (QWEN3_CODER, tagged("city", 'Malmö "}{<'), "", [("get_weather", '{"city": "Malmö \\"}{<"}')]),
    (QWEN3_CODER, f"I look.\n{TIME_TAGS}\n{tagged('days', '2')}", "I look.", [TIME, ("get_weather", '{"days": 2}')]),
    (QWEN3_CODER, tagged("city", "two\n\nlines "), "", [("get_weather", '{"city": "two\\n\\nlines "}')]),
    (QWEN3_CODER, tagged("now", "True"), "", [("get_weather", '{"now": true}')]),
    (QWEN3_CODER, tagged("days", "soon"), "", [("get_weather", '{"days": "soon"}')]),
    (QWEN3_CODER, tagged("unknown", "1"), "", [("get_weather", '{"unknown": "1"}')]),
    (QWEN3_CODER, cut(tagged("city", "Malmö")), "", [("get_weather", '{"city": "Ma')]),
    *((QWEN3_CODER, tagged("city", value), "", [("get_weather", f'{{"city": "{value}"}}')]) for value in (
        "x</parameter> y", "</parameter>", "a </parameter></parameter> <parameter>", "</parameter>\u00a0</function",
    )),
    (QWEN3_CODER, "<tool_call><function=get_weather><parameter=city>Oslo</parameter> <parameter=days>2</parameter>"
     "</function></tool_call>", "", [("get_weather", '{"city": "Oslo", "days": 2}')]),  # without new lines
    (QWEN3_CODER, cut(tagged("city", "x</parameter> Malmö")), "", [("get_weather", '{"city": "x</parameter> Ma')]),
    (QWEN3_CODER, f"<tool_call>{TIME_TAGS}", "<tool_call>", [TIME]),
    (QWEN3_CODER, f"{cut(tagged('city', 'x'), 'ity')}{tagged('days', '2')}!", "!", [("get_weather", '{"days": 2}')]),
    (GLM, f"{cut(glm('get_weather', ('city', 'x')), 'y>')}{glm('get_time')}", "", [("get_weather", "{}")]),
    (KIMI_K2, f"<|tool_call_begin|>get_time{' ' * 300}{kimi(*TIME)}",
     f"<|tool_call_begin|>get_time{' ' * 300}".rstrip(), [TIME]),
    (FUNCTION_GEMMA, f"<start_function_call>{gemma('get_time')}", "<start_function_call>", [TIME]),
    (QWEN3_CODER, tagged("city", "x", "unknown"), tagged("city", "x", "unknown"), []),
    (QWEN3_CODER, "<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>", []),
    (GLM, glm("get_weather", ("city", 'Malmö "}{<'), ("days", "2")), "", [WEATHER]),
    (GLM, f"I look.\n{glm('get_time')}\n{glm('get_weather', ('at', '[1, {}]'))}", "I look.",
     [TIME, ("get_weather", '{"at": [1, {}]}')]),
    (GLM, "<tool_call>get_time</tool_call>!", "!", [TIME]),
    (GLM, cut(glm("get_weather", ("city", "Malmö"))), "", [("get_weather", '{"city": "Ma')]),
    (GLM, glm("get_weather", ("city", "x</arg_value> y"), ("days", "2")), "",
     [("get_weather", '{"city": "x</arg_value> y", "days": 2}')]),
    (GLM, glm("unknown", ("city", "x")), glm("unknown", ("city", "x")), []),
    (PYTHONIC, """[get_weather(city="Malmö \\"}{<", days=2)]""", "", [WEATHER]),
    (PYTHONIC, """ [get_weather(city='Malmö "}{<', days=2), get_time()]\n""", "", [WEATHER, TIME]),
    (PYTHONIC, "[get_time(),get_time( ) ]", "", [TIME, TIME]),
    (PYTHONIC, "[get_time()] Done.", " Done.", [TIME]),
    (PYTHONIC, "[get_weather(now=True, at=[None, 'a', (1.5, -2), {'k': {\"l\": []}}, {}])]", "",
     [("get_weather", '{"now": true, "at": [null, "a", [1.5, -2], {"k": {"l": []}}, {}]}')]),
    (PYTHONIC, r"""[get_weather(city='it\'s \x41\u00e9\ud83d\ude00\n\\', days=1)]""", "",
     [("get_weather", r'''{"city": "it's Aé😀\n\\", "days": 1}''')]),
    (PYTHONIC, "[get_weather('Oslo', 3, now=False)]", "",
     [("get_weather", '{"city": "Oslo", "days": 3, "now": false}')]),
    (PYTHONIC, "[get_weather(city=Oslo, days=soon, now=nan)]", "",
     [("get_weather", '{"city": "Oslo", "days": "soon", "now": "nan"}')]),
    (PYTHONIC, "[get_weather(city=, days=)]", "", [("get_weather", '{"city": "", "days": ""}')]),
    *((PYTHONIC, f"[get_weather({written})]", "", [("get_weather", read)]) for written, read in (
        ('city="""Oslo"""', '{"city": "Oslo"}'),
        ("""city='''a "b"\n'c', ''', days=2""", '{"city": "a \\"b\\"\\n\'c\', ", "days": 2}'),
        ('city="", now=True', '{"city": "", "now": true}'),
        ('city="""""", days=-1', '{"city": "", "days": -1}'),
        ("""city="Os" 'lo'""", '{"city": "Oslo"}'),
        ('city=("Os"\n "lo")', '{"city": "Oslo"}'),
        ('city="two\nlines\\\n"', '{"city": "two\\nlines"}'),
        (r"city='\d\/'", r'{"city": "\\d\\/"}'),
        ("at=[(1,), {'a': 1,}],", '{"at": [[1], {"a": 1}]}'),
        ("from='Oslo', user-id=1", '{"from": "Oslo", "user-id": 1}'),
        # Once a call has begun, a value that is no literal is a string.
        ('"Oslo", at={1, 2}', '{"city": "Oslo", "at": "{1, 2}"}'),
        ("city='Oslo', at=f'{a}, b', days=2", '{"city": "Oslo", "at": "f\'{a}, b\'", "days": 2}'),
        ("city='Oslo', city='Bergen'", '{"city": "Oslo"}'),
    )),
    (PYTHONIC, "[get_weather(city='Oslo', at=[1, (2]]", "]", [OSLO]),
    (PYTHONIC, "[get_weather(city='Oslo', at='Mal", "", [("get_weather", '{"city": "Oslo"')]),
    *((PYTHONIC, f"```tool_code\n{code}\n```", "", calls) for code, calls in (
        ("get_time()", [TIME]),
        ("print(get_weather(city='Oslo'))", [OSLO]),
        ("print( get_time() )\nget_weather(\n    'Oslo',\n)\n", [TIME, OSLO]),
        (f"get_weather(city='{'x' * 200}')", [("get_weather", f'{{"city": "{"x" * 200}"}}')]),
    )),
    (PYTHONIC, "I look: ```tool_code\nget_time()\n``` And:\n```tool_code\nprint(get_time())", "I look: And:",
     [TIME, TIME]),
    (PYTHONIC, "[get_time()] ```tool_code\nget_time()```", "", [TIME, TIME]),
    (PYTHONIC, "```tool_code\nget_time()\nx = 1\n```", "\nx = 1\n```", [TIME]),
    *((PYTHONIC, text, text, []) for text in (
        "```python\nget_time()\n```", "```\nget_time()\n```", "```tool_code\nx = get_time()\n```",
        "```tool_code\nprint(get_time()['a'])\n```", "```tool_code\nprint(1)\n```", "```tool_code\n[get_time()]\n```",
        "```tool_code\nprint(print(get_time()))\n```", "[```tool_code", "[get_ti ```tool_",
        '[get_weather(city=f"{a}, b")]', '[get_weather(**{"city": "Oslo"})]',
        "[get_weather(*['Oslo'])]", "[get_weather(city=name())]", "[get_weather(city='a' + b)]",
        "[get_weather(at=[x for x in 'a'])]", "[get_weather(at=[1, (2]]", "[get_weather(city=b'a')]",
        "[get_weather(at={**{}})]", "[get_weather(at=[1e999])]", "[get_weather(at={[1]: 2})]",
        cut("[get_weather(city='Malmö')]"), cut('[get_weather(city="""Malmö""")]'), "[get_time(", '[get_time("',
        "[get_ti", "[get_time]", "[1, 2]", "get_time() says when.", "[unknown(a=1)]", "[print(get_time())]",
        "I look: [get_time()]",  # a call is the answer itself
    )),
    (FUNCTION_GEMMA, gemma("get_weather", 'city:<escape>Malmö "}{<<escape>,days:2'), "", [WEATHER]),
    (FUNCTION_GEMMA, f"I look.\n{gemma('get_time')}{gemma('get_weather', 'days:2')} So.", "I look. So.",
     [TIME, ("get_weather", '{"days": 2}')]),
    (FUNCTION_GEMMA, gemma("get_weather", "now:true,at:[<escape>],<escape>,{k:<escape>v<escape>,n:null}]"), "",
     [("get_weather", '{"now": true, "at": ["],", {"k": "v", "n": null}]}')]),
    (FUNCTION_GEMMA, cut(gemma("get_weather", "city:<escape>Malmö<escape>")), "", [("get_weather", '{"city": "Ma')]),
    (FUNCTION_GEMMA, "<start_function_call>call:get_weather{days:2<end_function_call>!", "!",
     [("get_weather", '{"days": 2}')]),
    (FUNCTION_GEMMA, gemma("unknown", "a:1"), gemma("unknown", "a:1"), []),
    (FUNCTION_GEMMA, "<start_function_call>get_time{}", "<start_function_call>get_time{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("written", "text", "shown", "calls"), CASES)
def test_calls_are_taken_out_of_a_text(written: ToolFormat, text: str, shown: str, calls: list[Call]) -> None:
    assert parsed([text], written) == (shown, calls)
    assert parsed(list(text), written) == (shown, calls)
    for size in (2, 3, 7):
        assert parsed([text[at : at + size] for at in range(0, len(text), size)], written) == (shown, calls)


@pytest.mark.parametrize(("written", "text", "shown", "calls"), CASES)
def test_the_first_call_ends_the_text_where_calls_are_not_parallel(
    written: ToolFormat, text: str, shown: str, calls: list[Call]
) -> None:
    for pieces in ([text], list(text)):
        found, first = parsed(pieces, written, is_parallel=False)
        assert first == calls[:1]
        assert shown.startswith(found) or not calls


@pytest.mark.parametrize("written", [QWEN3_CODER, GLM, DEEPSEEK_V3, KIMI_K2, FUNCTION_GEMMA])
def test_arguments_stream_from_the_name_on(written: ToolFormat) -> None:
    text = next(
        text for found, text, _, calls in CASES if found is written and len(calls) and '"city"' in calls[0][1]
    )
    parser = ToolCallParser(written, FUNCTIONS)
    deltas = [delta for char in text for delta in parser.push(char)[1]]
    assert [bool(delta.name) for delta in deltas][:2] == [True, False]
    assert len(deltas) > 8


def test_pythonic_arguments_stream_one_by_one() -> None:
    parser = ToolCallParser(PYTHONIC, FUNCTIONS)
    deltas = [delta for char in "[get_weather(city='Oslo', days=2, now=True)]" for delta in parser.push(char)[1]]
    written = [(delta.name, delta.arguments) for delta in deltas]
    assert written == [("get_weather", '{"city": "Oslo"'), ("", ', "days": 2'), ("", ', "now": true}')]


@pytest.mark.parametrize("filler", ["x", " ", "\\n", "[", "9", "'"])
@pytest.mark.parametrize("begin", ["[get_weather(city='", "[get_weather(", "[get_weather(at=[{", "["])
def test_long_keywords_take_linear_time(begin: str, filler: str) -> None:
    began = time.process_time()
    parser = ToolCallParser(PYTHONIC, FUNCTIONS)
    parser.push(begin)
    for _ in range(25_000):
        parser.push(filler)
    assert time.process_time() - began < 1.5  # 0.05 s


FRAGMENTS = st.sampled_from(
    [text for _, text, _, _ in CASES]
    + ["<tool_call>", "</tool_call>", "<tool_", "</", "\n", "get_time", "{", "}", "[", '"', "\\", "\\ud83d", "\\ude0"]
    + ['{"name": "get_time"}', '{"name": "get_time", "arguments": ', '"{', '{"arguments": ', ', "name": "get_time"']
    + [",", ":", " ", ";", "text", "1", WEATHER_TEXT[:30], " " * 120, "```json"]
    + ["```tool_code\n", "print(", "get_time(", ")", "```", "a='b'", '"""', "'"]
    + ["<tool_call>\n<function=get_weather>\n<parameter=city>\n", "</parameter>", "</function>", "</arg_value>"]
)


@given(st.lists(FRAGMENTS, max_size=6).map("".join), st.booleans(), st.data())
def test_how_a_text_was_cut_does_not_matter(text: str, is_parallel: bool, data: st.DataObject) -> None:
    pieces = in_pieces(text, data)
    for written, _ in FORMATS.values():
        whole = parsed([text], written, is_parallel=is_parallel)
        assert parsed(pieces, written, is_parallel=is_parallel) == whole, written
        assert parsed(text, written, is_parallel=is_parallel) == whole, written

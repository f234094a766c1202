"""Streamed Markdown: the same output for any split into pieces, no word broken, no text lost."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.markdown.markdown import MAX_SPAN, Markdown
from cli.markdown.wrap import may_break
from tests.cli.terminal.screen import SGR, Screen

NAMES = {"1": "b", "2": "d", "3": "i", "36": "c"}
WORDS = st.text(alphabet="ab漢字、é👍", min_size=1, max_size=14)
PIECES = [
    "a", "bc ", " ", "*", "**", "***", "_", "`", "```", "\n", "\n- ", "\n1. ", "# ", "> ", "\\", "|", "漢字", "。",
]  # fmt: skip
MARKED = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def show(text, columns=40, pieces=None, has_color=True):
    markdown = Markdown(lambda: columns, has_color)
    return "".join([*map(markdown.feed, pieces or [text]), markdown.finish()])


def rows(text, columns=40):
    screen = Screen(columns)
    screen.feed(show(text, columns).replace("\n", "\r\n"))
    return screen.rows


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@given(MARKED, st.lists(st.integers(0, 1000), max_size=12), st.integers(4, 30))
def test_the_output_does_not_depend_on_the_pieces(text, places, columns):
    assert show(text, columns, cut(text, places)) == show(text, columns)
    assert show(text, columns, list(text)) == show(text, columns)


@given(st.lists(WORDS, max_size=20), st.lists(st.sampled_from([" ", "  ", "\n", "\n\n"]), min_size=20, max_size=20))
def test_plain_text_is_wrapped_and_nothing_else(words, gaps):
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=False))
    shown = show(text, 30)
    assert "\x1b" not in shown
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    screen = Screen(30)
    screen.feed(shown.replace("\n", "\r\n"))
    assert len(screen.rows) == len(shown.split("\n")), "the terminal had to break a row"
    in_rows = [word for row in screen.rows for word in row.split()]
    assert "".join(in_rows) == "".join(words)
    for word in words:
        if not any(may_break(*pair) for pair in pairwise(word)):
            assert word in in_rows


@given(MARKED)
def test_marked_text_loses_marks_alone(text):
    def without_marks(shown):
        return re.sub(r"[*_`#\\\s]", "", SGR.sub("", shown))

    assert without_marks(show(text)) == without_marks(text)


def tagged(shown):
    """Write escape sequences as letters; <> is plain."""

    def tag(match):
        return f"<{''.join(NAMES[code] for code in match[0][4:-1].split(';') if code)}>"

    return SGR.sub(tag, shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("**Note:** be *very* quick", "<b>Note: <>be <i>very <>quick"),
        ("__b__, _i_, ***both***!", "<b>b<>, <i>i<>, <bi>both<>!"),
        ("**bold *it* `x`** end", "<b>bold <bi>it <bc>x <>end"),
        ("**bold *it***.", "<b>bold <bi>it<>."),
        ("这是**粗体**字", "这是<b>粗体<>字"),
        ("## A *b*\ntext", "<b>A <bi>b\n<>text"),
        ("run `a ** b` now", "run <c>a ** b <>now"),
        ("``a`b``", "<c>a`b<>"),
        ("- *x*\n  2) y", "<d>- <i>x\n<d>  2) <>y"),
        ("> said", "<d>> <>said"),
        ("```py\nx = a * b  # **no**\n```\nend", "<d>```py\n<c>x = a * b  # **no**\n<d>```\n<>end"),
        ("1. a:\n   ```\n   b\n   ```", "<d>1. <>a:\n<d>   ```\n<c>   b\n<d>   ```<>"),
    ],
)
def test_marks(text, shown):
    assert tagged(show(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["2*3*4 = 24", "a * b * c", "snake_case_name", "**open", "a `tick", "#hashtag", "***", "---", "| a | *b* |",
     "~x~", "f(**kwargs)", "C:\\dir", "\\(x\\)", "5 - 3", "-1", "1.5", "* * *"],
)  # fmt: skip
def test_what_is_no_mark_stays(text):
    assert SGR.sub("", show(text)) == text


def test_an_escaped_mark_is_text():
    assert show(r"\*not it\* and \_ \`") == "*not it* and _ `"


def test_a_mark_waits_for_its_end_and_not_for_ever():
    markdown = Markdown(lambda: 2000)
    assert markdown.feed("see **this") == "see"
    assert markdown.feed(" and** that") == " \x1b[0;1mthis and"
    assert markdown.feed(" **x" + " y" * MAX_SPAN).startswith(" \x1b[0mthat **x y y")


def test_without_color_code_is_plain():
    assert show("**a** `b`", has_color=False) == "\x1b[0;1ma \x1b[0mb"


def test_rows_of_lists_are_indented():
    assert rows("- one two three four\n- five", 12) == ["- one two", "  three four", "- five"]
    assert rows("10. aaaa bbbb cccc", 12) == ["10. aaaa", "    bbbb", "    cccc"]


def test_wide_characters_take_two_columns_and_punctuation_begins_no_row():
    assert rows("漢字漢字漢字", 8) == ["漢字漢字", "漢字"]
    assert rows("漢字漢字。漢", 8) == ["漢字漢", "字。漢"]
    assert rows("한국어 문장입니다", 12) == ["한국어", "문장입니다"]


def test_a_word_longer_than_a_row_begins_its_own_and_streams():
    url = "https://example.org/" + "x" * 30
    assert rows(f"see {url} now", 24) == ["see", url[:24], url[24:48], url[48:] + " now"]
    markdown = Markdown(lambda: 10)
    assert markdown.feed("ab " + "c" * 12) == "ab\n" + "c" * 12
    assert markdown.feed("c") == "c"


def test_code_is_not_wrapped():
    line = "x = " + "call(one, two) + " * 5
    assert f"\x1b[0;36m{line}\n" in show(f"```\n{line}\n```", 20)


def test_a_word_is_shown_once_and_whole():
    markdown = Markdown(lambda: 20)
    assert [markdown.feed(piece) for piece in ["Hel", "lo w", "orld", "!", " "]] == ["", "Hello", "", "", " world!"]


def test_rows_follow_a_new_width():
    columns = 30
    markdown = Markdown(lambda: columns)
    shown = markdown.feed("aaaa bbbb cccc dddd ")
    columns = 12
    shown += markdown.feed("eeee ffff gggg hhhh")
    assert shown + markdown.finish() == "aaaa bbbb cccc dddd\neeee ffff\ngggg hhhh"

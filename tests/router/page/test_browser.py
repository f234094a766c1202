"""The page in Chromium, in front of a real cluster: a chat that outlives its worker, keys, and allowed sources."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.harness.clients import API_KEY
from tests.harness.cluster import SHORT_LEASES, Cluster, running_cluster
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MAX_TOKENS = 400
# The name of an element for a screen reader; and the elements without one.
NAMELESS = """() => {
  const found = document.querySelectorAll('button, input, select, textarea, summary, [role]');
  return [...found].filter((node) => {
    const label = node.ariaLabel || node.getAttribute('aria-labelledby') || node.labels?.length;
    return !(label || node.textContent.trim() || ['list', 'status'].includes(node.getAttribute('role')));
  }).map((node) => node.outerHTML.slice(0, 120));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    router = (f"--api-key={API_KEY}", "--local-prefill-tokens=0")
    with running_cluster(1, 2, worker_args=SHORT_LEASES, router_args=router) as running:
        yield running


@pytest.fixture
def page(browser: Any, shared: Cluster) -> Iterator[Any]:
    """Open the page and enter its key. `wrong` lists its errors."""
    context = browser.new_context()
    page = context.new_page()
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda told: page.wrong.append(told.text) if "Content Security" in told.text else None)
    page.goto(shared.url)
    page.get_by_role("dialog", name="API key").wait_for()
    page.get_by_label("Key", exact=True).fill(API_KEY)
    page.get_by_role("button", name="Use key").click()
    page.locator("#link", has_text="live").wait_for()
    yield page
    assert page.wrong == []
    context.close()


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def rendered(page: Any, markdown: str) -> str:
    """Return what the page shows for a text that arrives at once."""
    return str(
        page.evaluate(
            """async (text) => {
              const { Markdown } = await import('/page/markdown.js');
              const node = document.createElement('div');
              const shown = new Markdown(node);
              shown.open = text;
              shown.show();
              return node.textContent;
            }""",
            markdown,
        )
    )


def test_a_chat_goes_on_with_the_same_text_when_its_worker_is_killed(page: Any, shared: Cluster) -> None:
    prompt, expected = long_answer(shared)
    page.get_by_text("Sampling and tools").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill(str(MAX_TOKENS))
    page.get_by_text("Sampling and tools").click()
    ask(page, prompt)
    shown = page.locator(".message.assistant .text")
    wait_until(lambda: len(shown.text_content() or "") > 20)
    kill_in_mid_answer(shared)
    page.locator(".told", has_text="prompt").wait_for(timeout=120_000)
    assert shown.text_content() == rendered(page, expected)
    page.locator("#journeys .state", has_text="moved").wait_for()
    row = page.locator("#journeys li", has_text="moved").first
    row.locator("summary").press("Enter")
    assert "replay after a move" in row.inner_text()
    wait_until(lambda: page.locator(".worker[data-state=connecting]").count() == 1)
    shared.start_killed()
    page.locator(".worker[data-state=connecting]").wait_for(state="detached")


def kill_in_mid_answer(shared: Cluster) -> None:
    """Kill the decode worker that answers. Both are stopped meanwhile, as an answer takes half a second."""
    names = [name for name in shared.services if name.startswith("decode")]
    for name in names:
        shared.services[name].signal(signal.SIGSTOP)
    shared.kill_busiest_decode()
    for name in names:
        shared.services[name].signal(signal.SIGCONT)


def long_answer(shared: Cluster) -> tuple[str, str]:
    """Return a prompt whose greedy answer does not end early, and that answer."""
    for number in range(20):
        prompt = f"Tell me of {number} things"
        with shared.client() as client:
            answer = client.chat.completions.create(
                model="dry-run", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=MAX_TOKENS
            )
        if answer.choices[0].finish_reason == "length":
            return prompt, answer.choices[0].message.content or ""
    raise AssertionError("all answers end early")


def test_stop_ends_the_request(page: Any) -> None:
    aborted: list[str] = []
    page.on("requestfailed", lambda request: aborted.append(request.failure))
    page.route("**/v1/chat/completions", lambda _: None)  # no answer yet
    ask(page, "Count to a million")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").and_(page.locator(":enabled")).wait_for()
    page.locator(".told", has_text="stopped").wait_for()
    assert aborted == ["net::ERR_ABORTED"]
    assert page.get_by_label("Message").evaluate("node => node === document.activeElement")


def test_thoughts_are_folded_and_tool_calls_get_their_results(page: Any) -> None:
    call = {"index": 0, "id": "call-1", "function": {"name": "get_weather", "arguments": '{"city": "<b>Oslo</b>"}'}}
    answers: Iterator[list[dict[str, Any]]] = iter(
        [[{"reasoning": "They ask of Oslo."}, {"tool_calls": [call]}], [{"content": "It **rains**."}]]
    )
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        chunks = [orjson.dumps({"choices": [{"index": 0, "delta": delta}]}).decode() for delta in next(answers)]
        events = "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]"))
        route.fulfill(status=200, content_type="text/event-stream", body=events)

    page.route("**/v1/chat/completions", answer)
    ask(page, "How is the weather?")
    thought = page.get_by_text("They ask of Oslo.")
    thought.wait_for(state="attached")
    assert not thought.is_visible()
    page.get_by_text("Thought for").click()
    assert thought.is_visible()
    assert page.locator(".call").inner_text() == 'get_weather\n{"city": "<b>Oslo</b>"}'
    page.get_by_label("Result of get_weather").fill("rain")
    page.keyboard.press("Enter")
    page.locator(".text strong", has_text="rains").wait_for()
    user, assistant, tool = bodies[1]["messages"]
    assert user == {"role": "user", "content": "How is the weather?"}
    assert assistant["tool_calls"][0]["function"] == call["function"]
    assert tool == {"role": "tool", "tool_call_id": "call-1", "content": "rain"}


def test_a_worker_is_drained_and_taken_back_with_the_keyboard(page: Any) -> None:
    page.get_by_role("button", name="Drain decode-0").press("Enter")
    page.get_by_role("dialog", name="Drain decode-0?").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.get_by_role("button", name="Drain prefill-0").press("Enter")
    page.get_by_role("button", name="Drain", exact=True).press("Enter")
    told = page.get_by_text(re.compile("prefill-0 is the only prefill worker of dry-run"))
    told.wait_for()
    page.get_by_role("button", name="Cancel").press("Enter")
    told.wait_for(state="hidden")


def test_a_worker_changes_its_role_with_the_keyboard(page: Any) -> None:
    page.get_by_role("button", name="Use decode-1 for prefill").press("Enter")
    page.get_by_role("dialog", name="Use decode-1 for prefill?").wait_for()
    page.get_by_role("button", name="Change role").press("Enter")
    page.locator("#prefill .worker", has_text="decode-1").wait_for()
    page.get_by_role("button", name="Use decode-0 for prefill").press("Enter")
    page.get_by_role("button", name="Change role").press("Enter")
    told = page.get_by_text("decode-0 is the only decode worker of dry-run")
    told.wait_for()
    page.get_by_role("button", name="Cancel").press("Enter")
    page.get_by_role("button", name="Use decode-1 for decode").press("Enter")
    page.get_by_role("button", name="Change role").press("Enter")
    page.locator("#decode .worker", has_text="decode-1").wait_for()


def test_everything_has_a_name_and_nothing_is_cut_off_on_a_phone(page: Any) -> None:
    ask(page, "Hello")
    page.locator("#journeys li").first.wait_for()
    assert page.evaluate(NAMELESS) == []
    page.set_viewport_size({"width": 360, "height": 700})
    for view in ("Cluster", "Chat"):
        page.get_by_role("button", name=view, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colors = page.evaluate(
            "() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert contrast(*colors) > 7, scheme


def contrast(*colors: str) -> float:
    """Compute the contrast of two CSS colours by WCAG."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, colors))
    return (light + 0.05) / (dark + 0.05)


MARKDOWN = {
    "**bold** and *em* with `a<b`": "<p><strong>bold</strong> and <em>em</em> with <code>a&lt;b</code></p>",
    "# One\n\ntext": "<h3>One</h3><p>text</p>",
    "- a\n- b\n  - c\n\n3. d": '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="3"><li>d</li></ol>',
    "```py\nx = 1\n\ny = 2\n```\nafter": '<pre tabindex="0"><code>x = 1\n\ny = 2</code></pre><p>after</p>',
    "|a|b|\n|-|-|\n|1|2|": "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
    "> quoted": "<blockquote><p>quoted</p></blockquote>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p>x</p>",
    "[x](https://a.b/c)": '<p><a href="https://a.b/c" target="_blank" rel="noopener noreferrer">x</a></p>',
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
}


def test_markdown_is_the_same_in_pieces_as_at_once(page: Any) -> None:
    for text, expected in MARKDOWN.items():
        for size in (1, 3, len(text)):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            html = page.evaluate(
                """async (pieces) => {
                  const { Markdown } = await import('/page/markdown.js');
                  const node = document.createElement('div');
                  const shown = new Markdown(node);
                  for (const piece of pieces) { shown.open += piece; shown.show(); }
                  shown.tail.replaceWith(...shown.tail.childNodes);
                  return node.innerHTML;
                }""",
                pieces,
            )
            assert html == expected, (text, size)

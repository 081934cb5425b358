"""The page in a real Chromium: a conversation, stop, reload, a failing server, hostile text, phone and dark."""

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from nibblelm import LLM, SamplingParams
from nibblelm.runner import Runner

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S, wait_for

STORY = "a dog who lost his ball"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium on the PATH; Debian's package has it: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=1000 * PATIENCE_S)
        expect.set_options(timeout=1000 * PATIENCE_S)
        yield started
        started.close()
        expect.set_options()


def visit(browser: Browser, url: str, **options: Any) -> Page:
    """The page, in a context of its own."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    page.goto(url)
    return page


@pytest.fixture
def page(browser: Browser, server: Any) -> Iterator[Page]:
    page = visit(browser, "about:blank", viewport={"width": 900, "height": 700})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    yield page
    page.context.close()
    assert problems == []


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def setting(page: Page, name: str, value: str) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label(name).fill(value)
    page.get_by_role("button", name="Close").click()


def answered(page: Page, count: int) -> None:
    """Wait for so many answers to be finished."""
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("article.assistant .figures")).to_have_count(count)


def test_a_conversation_that_survives_a_reload(page: Page, llm: LLM, server: Any) -> None:
    expect(page.get_by_role("heading")).to_have_text("demo")
    setting(page, "Temperature", "0")
    setting(page, "Most tokens", "40")
    say(page, STORY)
    answered(page, 1)
    want = llm.chat([{"role": "user", "content": STORY}], SamplingParams(temperature=0, max_tokens=40)).text
    paragraphs = page.locator("article.assistant p").all_inner_texts()
    assert " ".join(" ".join(paragraphs).split()) == " ".join(want.split())
    assert re.fullmatch(r"40 tokens, [\d.]+ tokens/s", page.locator(".figures").inner_text())
    say(page, "a cat")
    answered(page, 2)
    before = page.locator("#log").inner_text()
    page.reload()
    answered(page, 2)
    assert page.locator("#log").inner_text() == before
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").input_value() == "0"
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop(way: str, page: Page, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, allowed = Runner.decode, threading.Semaphore(10)  # steps: enough for some words, too few for an answer

    def held(self: Runner, *args: Any) -> Any:
        allowed.acquire(timeout=PATIENCE_S)
        return decode(self, *args)

    monkeypatch.setattr(Runner, "decode", held)
    server = running()

    def aborted(times: int) -> None:
        """The server sees the client go, and the engine is told so before it takes more than a step."""
        assert wait_for(lambda: server.service.unfinished == 0)
        allowed.release(20)
        assert wait_for(lambda: server.service.llm.engine.stats.finished["abort"] == times)

    page.goto(f"http://127.0.0.1:{server.port}")
    say(page, STORY)
    expect(page.locator("article.assistant p")).to_be_visible()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    answered(page, 1)
    assert page.locator(".error").count() == 0
    text = page.locator("article.assistant").inner_text()
    aborted(1)
    page.wait_for_timeout(200)
    assert page.locator("article.assistant").inner_text() == text
    say(page, "a cat")
    expect(page.locator("article.assistant").nth(1).locator("p")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    aborted(2)


def test_a_failing_server(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, STORY)
    expect(page.get_by_role("alert")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    answered(page, 1)
    assert page.get_by_role("alert").count() == 0
    assert page.locator("article.user").count() == 1
    setting(page, "Most tokens", "100000")
    say(page, "a cat")
    expect(page.get_by_role("alert")).to_contain_text("the context holds 512")


def events_of(text: str) -> str:
    """An event stream that says `text`."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text[i : i + 7]}}]} for i in range(0, len(text), 7)]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


HOSTILE = """# Title <img src=x onerror="window.harmed=1">
<script>window.harmed = 1</script> **bold <b onclick="window.harmed=1">x</b>** and `<i>code</i>`
- one [good](https://example.org/) [bad](javascript:window.harmed=1) [worse](data:text/html,x)
- two <iframe srcdoc="<script>parent.harmed=1</script>"></iframe>

```html
<script>window.harmed = 1</script>
```
1. first *em*
"""


def test_hostile_text_is_text(page: Page) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events_of(HOSTILE)),
    )
    say(page, '<img src=x onerror="window.harmed=1">')
    answered(page, 1)
    answer = page.locator("article.assistant")
    for name, count in dict(script=0, img=0, iframe=0, b=0, i=0, a=1, strong=1, em=1, li=3, pre=1, h2=1).items():
        assert answer.locator(name).count() == count, name
    assert answer.locator("a").get_attribute("href") == "https://example.org/"
    assert "<script>window.harmed = 1</script>" in answer.locator("pre").inner_text()
    page.evaluate(
        """new Promise((done) => {
             document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.harmed=1">')
             document.body.lastElementChild.addEventListener('error', () => done())
           })"""
    )
    assert page.evaluate("window.harmed") is None  # the policy of the page holds even for what gets in


def test_phone_dark_and_keyboard(browser: Browser, server: Any, tmp_path: Path) -> None:
    page = visit(browser, server.url, viewport={"width": 360, "height": 640}, color_scheme="dark", has_touch=True)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 25, 29)"
    say(page, "x" * 300)
    answered(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.get_by_label("Message").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 640
    order = []
    page.get_by_label("Message").focus()
    for _ in range(5):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert {"text", "send"} <= set(order)
    page.get_by_label("Message").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.get_by_label("Message").input_value() == "one\ntwo"
    page.screenshot(path=tmp_path / "phone.png")
    page.context.close()


def test_a_key_is_asked_for(browser: Browser, serving: Any, folder: Path) -> None:
    locked = serving(folder, "--api-key", "secret", "--served-model-name", "demo")
    page = visit(browser, locked.url)
    expect(page.get_by_role("heading")).to_contain_text("a key is needed")
    setting(page, "API key", "secret")
    expect(page.get_by_role("heading")).to_have_text("demo")
    setting(page, "Most tokens", "5")
    say(page, STORY)
    answered(page, 1)
    page.context.close()

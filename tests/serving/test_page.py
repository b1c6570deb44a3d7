"""The page at ``/`` in a real browser; skipped if no browser is installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import StartServer
from serving.sites import Site
from serving.waiting import PATIENCE, until

import gecko
from gecko.data.chat import DEFAULT_TEMPLATE

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open a page; fail at any error of the script, and at any request to another host."""
    page = browser.new_page(viewport={"width": 1200, "height": 760})
    page.set_default_timeout(PATIENCE * 1000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if "127.0.0.1" not in request.url else None)
    yield page
    page.close()
    assert [text for text in wrong if not text.startswith("data:")] == []


def shows(page: Any, place: str, text: str | re.Pattern[str]) -> None:
    """Wait until the page shows the text."""
    from playwright.sync_api import expect

    expect(page.locator(place)).to_have_text(text, timeout=PATIENCE * 1000)


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.click("#send")
    shows(page, "#send", "Send")


def position(page: Any) -> int:
    return int(page.text_content("#position").replace(",", ""))


def test_a_conversation(page: Any, site: Site, model: gecko.Gecko) -> None:
    page.goto(site.url)
    shows(page, "#model", "small")
    page.fill("#tokens", "40")
    page.fill("#temperature", "0")
    say(page, "Hello <b>you</b>")
    prompt = [256, *b"User: Hello <b>you</b>\n\nAssistant:"]
    expected = bytes(gecko.generate(model, prompt, max_new_tokens=40, temperature=0).tokens[0]).decode()
    assert page.text_content(".assistant") == expected
    assert page.text_content(".user") == "Hello <b>you</b>"
    assert position(page) == (len(prompt) + 40)
    assert re.fullmatch(r"[\d,]+", page.text_content("#speed")), "a short answer has a speed too"
    state = page.text_content("#state-bytes")
    assert state.startswith(f"{model.empty_state().num_bytes / 1000:.1f}")
    say(page, "More")
    assert page.locator(".assistant").count() == 2
    assert position(page) > 2 * 40
    assert page.text_content("#state-bytes") == state
    assert page.text_content("#first").endswith("ms")
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert position(page) == 0


def test_settings_are_sent_and_the_seed_gives_the_text(page: Any, site: Site, model: gecko.Gecko) -> None:
    page.goto(site.url)
    page.fill("#system", "Be short.")
    page.fill("#tokens", "30")
    page.fill("#temperature", "1.5")
    page.fill("#top-p", "0.7")
    page.fill("#seed", "5")
    say(page, "Hi")
    prompt = [256, *b"System: Be short.\n\nUser: Hi\n\nAssistant:"]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.5, "top_p": 0.7}
    five, six = (bytes(gecko.generate(model, prompt, seed=s, **options).tokens[0]).decode() for s in (5, 6))
    assert five != six
    assert page.text_content(".assistant") == five
    shows(page, "#ended", "30 tokens, the most allowed; seed 5")
    page.click("#again")
    shows(page, "#ended", "30 tokens, the most allowed; seed 6")
    assert page.text_content(".assistant") == six
    assert page.locator(".turn").count() == 2


def test_without_a_seed_the_page_says_which_one_it_drew(page: Any, site: Site, model: gecko.Gecko) -> None:
    page.goto(site.url)
    page.click("#mode-text")
    page.fill("#tokens", "20")
    page.fill("#temperature", "1.5")
    say(page, "once")
    drawn = int(page.text_content("#ended").rpartition("seed ")[2])
    tokens = gecko.generate(model, [256, *b"once"], max_new_tokens=20, temperature=1.5, seed=drawn).tokens[0]
    assert page.text_content("#text") == "once" + bytes(tokens).decode()


def test_copying(page: Any, site: Site) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(site.url)
    page.fill("#tokens", "10")
    say(page, "Hello")
    page.click("#copy")
    shows(page, "#ended", "copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.text_content(".assistant")
    page.click("#mode-text")
    say(page, "Once")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.click("#copy")
    shows(page, "#ended", "copied")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == page.text_content("#text")


@pytest.mark.parametrize("tuned", [False, True], ids=["plain", "template"])
def test_a_model_without_a_chat_template_is_said_to_be_none_for_chat(
    page: Any, start: StartServer, tmp_path: Path, tuned: bool
) -> None:
    if tuned:
        (tmp_path / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    page.goto(start().url)
    shows(page, "#model", "small")
    assert page.is_visible("#note") != tuned
    page.click("#mode-text")
    assert not page.is_visible("#note")


@pytest.mark.usefixtures("slow_steps")
def test_the_keyboard_is_enough(page: Any, site: Site) -> None:
    page.goto(site.url)
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.get_attribute("#prompt", "placeholder")
    page.fill("#tokens", "5")
    page.focus("#prompt")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    shows(page, "#ended", re.compile("^5 tokens"))
    assert page.text_content(".user") == "a\nb"
    page.fill("#tokens", "4000")
    page.focus("#prompt")
    page.keyboard.type("More")
    page.keyboard.press("Enter")
    until(lambda: len(page.locator(".assistant").last.text_content()) > 5)
    page.keyboard.press("Escape")
    shows(page, "#ended", re.compile("^stopped; seed"))
    site.wait_until_idle()


def test_a_refused_question_can_be_changed(page: Any, site: Site) -> None:
    page.goto(site.url)
    page.fill("#tokens", "5")
    page.fill("#top-p", "2")
    say(page, "Hello")
    assert "top_p" in page.text_content(".error")
    assert page.input_value("#prompt") == "Hello"
    page.fill("#top-p", "1")
    page.click("#send")
    shows(page, "#ended", re.compile("^5 tokens"))
    assert page.locator(".user").count() == 1
    assert page.locator(".error").count() == 0


@pytest.mark.parametrize("width", [320, 600, 1200])
def test_nothing_is_wider_than_the_screen(page: Any, site: Site, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    page.goto(site.url)
    if width < 800:
        page.click("summary")
    page.fill("#tokens", "200")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width < 800:
        page.click("summary")
    say(page, "x" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= 640
    assert page.locator("#prompt").bounding_box()["width"] > 150


def test_a_text_is_continued(page: Any, site: Site, model: gecko.Gecko) -> None:
    page.goto(site.url)
    page.click("#mode-text")
    page.fill("#tokens", "30")
    page.fill("#temperature", "0")
    say(page, "once upon")
    say(page, "")
    expected = bytes(gecko.generate(model, [256, *b"once upon"], max_new_tokens=60, temperature=0).tokens[0]).decode()
    assert page.text_content("#text") == "once upon" + expected
    assert position(page) == (10 + 60)


@pytest.mark.usefixtures("slow_steps")
def test_position_grows_while_text_comes_and_stopping_frees_the_row(page: Any, site: Site) -> None:
    page.goto(site.url)
    page.fill("#tokens", "4000")
    page.fill("#prompt", "Go on")
    page.click("#send")
    until(lambda: position(page) > 60)
    before = position(page)
    until(lambda: position(page) > before)
    shows(page, "#send", "Stop")
    page.click("#send")
    shows(page, "#send", "Send")
    site.wait_until_idle()
    assert position(page) < 4000
    assert page.locator(".error").count() == 0


def test_the_key_is_asked_for(page: Any, start: StartServer) -> None:
    page.goto(start(api_key="secret").url)
    page.wait_for_selector("#key")
    say(page, "Hello")
    assert "API key" in page.text_content(".error")
    page.fill("#key", "secret")
    page.dispatch_event("#key", "change")
    shows(page, "#model", "small")
    page.fill("#tokens", "5")
    say(page, "Hello")
    assert len(page.text_content(".assistant")) == 5


def test_a_saved_state_may_be_chosen(page: Any, start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    book = gecko.generate(model, [256, *b"a book " * 100], max_new_tokens=0).state
    book.save(tmp_path / "book.state")
    page.goto(start(states=tmp_path).url)
    page.wait_for_selector("#memory")
    page.select_option("#memory", "book")
    page.fill("#tokens", "7")
    say(page, "Who?")
    assert position(page) == (book.position[0] + len("User: Who?\n\nAssistant:") + 7)

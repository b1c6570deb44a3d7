"""The page at ``/`` in a real browser; skipped if no browser is installed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving.conftest import StartServer
from serving.sites import PATIENCE, Site, alone, document, greedy, until

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


def fill(page: Any, **settings: object) -> None:
    for name, value in settings.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))


def position(page: Any) -> int:
    return int(page.text_content("#position").replace(",", ""))


def test_a_conversation(page: Any, site: Site, model: gecko.Gecko) -> None:
    page.goto(site.url)
    shows(page, "#model", "small")
    fill(page, tokens=40, temperature=0)
    say(page, "Hello <b>you</b>")
    prompt = "User: Hello <b>you</b>\n\nAssistant:"
    assert page.text_content(".assistant") == greedy(model, prompt, 40)
    assert page.text_content(".user") == "Hello <b>you</b>"
    assert position(page) == 1 + len(prompt) + 40
    assert re.fullmatch(r"[\d,]+", page.text_content("#speed")), "a short answer has a speed too"
    state = page.text_content("#state-bytes")
    assert state.startswith(f"{model.empty_state().num_bytes / 1000:.1f}")
    say(page, "More")
    assert page.locator(".assistant").count() == 2
    assert position(page) > 2 * 40
    assert page.text_content("#state-bytes") == state
    assert page.text_content("#first").endswith("ms")
    assert not page.is_visible("#saving"), "the server saves nothing"
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert position(page) == 0


def test_settings_are_sent_and_the_seed_gives_the_text(page: Any, site: Site, model: gecko.Gecko) -> None:
    """Without a seed, the page says which one it drew."""
    page.goto(site.url)
    fill(page, system="Be short.", tokens=30, temperature=1.5, top_p=0.7, seed=5)
    say(page, "Hi")
    prompt = document("System: Be short.\n\nUser: Hi\n\nAssistant:")
    five, six = (alone(model, prompt, 30, seed=seed, temperature=1.5, top_p=0.7) for seed in (5, 6))
    assert five != six
    assert page.text_content(".assistant") == five
    shows(page, "#ended", "30 tokens, the most allowed; seed 5")
    page.click("#again")
    shows(page, "#ended", "30 tokens, the most allowed; seed 6")
    assert page.text_content(".assistant") == six
    assert page.locator(".turn").count() == 2
    page.click("#mode-text")
    fill(page, top_p=1, seed="")
    say(page, "once")
    drawn = int(page.text_content("#ended").rpartition("seed ")[2])
    assert page.text_content("#text") == "once" + alone(model, document("once"), 30, temperature=1.5, seed=drawn)


def test_a_text_is_continued(page: Any, site: Site, model: gecko.Gecko) -> None:
    page.goto(site.url)
    page.click("#mode-text")
    fill(page, tokens=30, temperature=0)
    say(page, "once upon")
    say(page, "")
    assert page.text_content("#text") == "once upon" + greedy(model, "once upon", 60)
    assert position(page) == 10 + 60


def test_copying(page: Any, site: Site) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(site.url)
    fill(page, tokens=10)
    say(page, "Hello")
    page.click("#copy")
    shows(page, "#ended", "copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.text_content(".assistant")
    page.evaluate("draw(show('assistant', ''), 'See:\\n```\\na <b>\\n```')")
    page.click(".code button")
    page.wait_for_selector(".code button.done")
    assert page.evaluate("navigator.clipboard.readText()") == "a <b>"
    page.click("#mode-text")
    say(page, "Once")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.click("#copy")
    shows(page, "#ended", "copied")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == page.text_content("#text")


def test_a_model_without_a_chat_template_is_said_to_be_none_for_chat(
    page: Any, site: Site, shared: StartServer
) -> None:
    for tuned, url in ((False, site.url), (True, shared(DEFAULT_TEMPLATE).url)):
        page.goto(url)
        shows(page, "#model", "small")
        assert page.is_visible("#note") != tuned
        assert page.input_value("#temperature") == ("0.2" if tuned else "0.8")
        page.click("#mode-text")
        assert not page.is_visible("#note")
        assert page.input_value("#temperature") == "0.8"
        fill(page, temperature=0.5)
        page.click("#mode-chat")
        assert page.input_value("#temperature") == "0.5"


@pytest.mark.usefixtures("slow_steps")
def test_the_keyboard_is_enough(page: Any, start: StartServer, tmp_path: Path) -> None:
    """The position grows while text comes; stopping frees the row, and what is stopped is not saved as a whole."""
    site = start(states=tmp_path, states_bytes=10**7)
    page.goto(site.url)
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.get_attribute("#prompt", "placeholder")
    fill(page, tokens=5)
    page.focus("#prompt")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    shows(page, "#ended", re.compile("^5 tokens"))
    assert page.text_content(".user") == "a\nb"
    fill(page, tokens=4000)
    page.focus("#prompt")
    page.keyboard.type("More")
    page.keyboard.press("Enter")
    until(lambda: len(page.locator(".assistant").last.text_content()) > 5)
    before = position(page)
    until(lambda: position(page) > before)
    shows(page, "#send", "Stop")
    page.keyboard.press("Escape")
    shows(page, "#ended", re.compile("^stopped; seed"))
    shows(page, "#send", "Send")
    site.wait_until_idle()
    assert position(page) < 4000
    assert page.locator(".error").count() == 0
    fill(page, name="talk")
    page.click("#save")
    shows(page, ".error", re.compile("no finished answer"))
    assert not list(tmp_path.glob("*.state"))


def test_a_refused_question_can_be_changed(page: Any, site: Site) -> None:
    page.goto(site.url)
    fill(page, tokens=5, top_p=2)
    say(page, "Hello")
    assert "top_p" in page.text_content(".error")
    assert page.input_value("#prompt") == "Hello"
    fill(page, top_p=1)
    page.click("#send")
    shows(page, "#ended", re.compile("^5 tokens"))
    assert page.locator(".user").count() == 1
    assert page.locator(".error").count() == 0


def test_nothing_is_wider_than_the_screen(page: Any, site: Site) -> None:
    for width in (320, 600, 1200):
        page.set_viewport_size({"width": width, "height": 640})
        page.goto(site.url)
        if width < 800:
            page.click("summary")
        fill(page, tokens=100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width < 800:
            page.click("summary")
        say(page, "x" * 300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.scrollHeight") <= 640
        assert page.locator("#prompt").bounding_box()["width"] > 150


def test_the_key_is_asked_for(page: Any, keyed: Site) -> None:
    page.goto(keyed.url)
    page.wait_for_selector("#key")
    say(page, "Hello")
    assert "API key" in page.text_content(".error")
    fill(page, key="secret")
    page.dispatch_event("#key", "change")
    shows(page, "#model", "small")
    fill(page, tokens=5)
    say(page, "Hello")
    assert len(page.text_content(".assistant")) == 5


def drawn(page: Any, text: str) -> str:
    """Return the HTML as which an answer is shown."""
    return page.evaluate("(text) => { const box = element('div'); draw(box, text); return box.innerHTML; }", text)


BUTTON = '<button aria-label="Copy code"></button>'
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


MARKDOWN = [
    ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    ("# One\n### Two", "<h3>One</h3><h5>Two</h5>"),
    ("**a _b_** *c* ~~d~~ `e*f*`", "<p><strong>a <em>b</em></strong> <em>c</em> <s>d</s> <code>e*f*</code></p>"),
    ("2 * 3 * 4, snake_case_name, \\*a\\*", "<p>2 * 3 * 4, snake_case_name, *a*</p>"),
    ("- a\n- b\n  - c\n    - d\n- e", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><ul><li><p>d</p></li></ul>"
     "</li></ul></li><li><p>e</p></li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    ("> a\n> - b", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote>"),
    ("```py\nx < 1\n\n# y\n```\nz",
     f'<div class="code">{BUTTON}<pre><code>x &lt; 1\n\n# y</code></pre></div><p>z</p>'),
    ("~~~\nnot closed\n```", f'<div class="code">{BUTTON}<pre><code>not closed\n```</code></pre></div>'),
    ("|a|b|\n|-|:-:|\n|1|**2**|\n|3", '<div class="wide"><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>'
     "<strong>2</strong></td></tr><tr><td>3</td><td></td></tr></table></div>"),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    ("[a *b*](https://x.y/z) https://q.r.", f'<p><a href="https://x.y/z" {LINK}>a <em>b</em></a> '
     f'<a href="https://q.r" {LINK}>https://q.r</a>.</p>'),
]  # fmt: skip


def test_markdown_is_shown(page: Any, site: Site) -> None:
    page.goto(site.url)
    for text, html in MARKDOWN:
        assert drawn(page, text) == html


HOSTILE = [
    "<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>", "[a](javascript:window.hit=1)",
    "[a](JaVaScRiPt:window.hit=1)", "[a](java\tscript:hit)", "[a](data:text/html,<script>hit</script>)",
    '[a](https://x.y/"onmouseover="window.hit=1)', "[<img src=x onerror=hit>](https://x.y)", "![a](https://x.y/z.png)",
    "```<script>\n</code></pre><script>window.hit = 1</script>\n```", "| <b>a</b> |\n|---|\n| <i onclick=hit>b</i> |",
    "# <svg onload=window.hit=1>", "`<b>`", "> <b>\n> - <a href='javascript:hit'>", "**<b>** _<i>_ ~~<u>~~",
    "[a](vbscript:hit) [b](//x.y) [c](/v1/states) [d](file:///etc/passwd)", "&lt;b&gt; &#x3c;b&#x3e;",
]  # fmt: skip


def test_nothing_that_a_model_writes_is_html(page: Any, site: Site) -> None:
    page.goto(site.url)
    names = set(re.split(" ", "p h3 div pre code button table tbody tr th td blockquote ul li a strong em s"))
    for text in HOSTILE:
        html = drawn(page, text)
        page.evaluate(
            "html => { document.body.insertAdjacentElement('beforeend', element('div')).innerHTML = html; }", html
        )
        found = page.evaluate(
            "() => [...document.body.lastChild.querySelectorAll('*')].map((one) => [one.localName,"
            " [...one.attributes].map((attribute) => attribute.name), one.getAttribute('href')])"
        )
        assert {name for name, _, _ in found} <= names, text
        attributes = {one for _, given, _ in found for one in given}
        assert attributes <= {"class", "aria-label", "href", "target", "rel"}, text
        assert all(href is None or href.startswith("https://") for _, _, href in found), text
        assert page.evaluate("window.hit") is None, text


ENDLESS = [
    ">" * 50_000, "- " * 20_000, "*" * 50_000, "`" * 50_001, "[" * 50_000, "_a" * 20_000, "**a" * 10_000,
    "# " + "#" * 50_000 + "x", "|" * 50_000 + "\n" + "|-" * 20_000,
]  # fmt: skip


def test_no_text_keeps_the_page_busy(page: Any, site: Site) -> None:
    page.goto(site.url)
    for text in ENDLESS:
        seconds = page.evaluate("(text) => { const begin = performance.now(); draw(element('div'), text);"
                                " return (performance.now() - begin) / 1000; }", text)  # fmt: skip
        assert seconds < 5


def test_an_answer_grows_without_being_drawn_anew(page: Any, site: Site) -> None:
    """Every beginning of a text looks as if it were the whole, and finished parts keep their elements."""
    page.goto(site.url)
    text = "# A\n\n- b\n- c\n\n|d|e|\n|-|-|\n|1|2|\n\n```\nf\n```\n**g** [h](https://i.j)"
    kept = page.evaluate(
        """(text) => {
            const box = element("div");
            let first = null;
            for (let end = 1; end <= text.length; end += 1) {
                draw(box, text.slice(0, end));
                const whole = element("div");
                draw(whole, text.slice(0, end));
                if (box.innerHTML !== whole.innerHTML) return text.slice(0, end);
                if (end === 5) first = box.firstChild;
            }
            return box.firstChild === first;
        }""",
        text,
    )
    assert kept is True


def test_a_conversation_is_saved_and_continued(
    page: Any, start: StartServer, model: gecko.Gecko, tmp_path: Path
) -> None:
    """The state is the one after the conversation that was shown; a page opened later goes on from it."""
    page.goto(start(states=tmp_path, states_bytes=10**7).url)
    page.wait_for_selector("#saving")
    fill(page, tokens=9, system="Be short.", name="talk")
    page.click("#save")
    assert "no finished answer" in page.text_content(".error")
    say(page, "Hi")
    say(page, "More")
    fill(page, name="a b")
    page.click("#save")
    shows(page, ".error >> nth=-1", re.compile("name must have"))
    fill(page, name="talk")
    page.evaluate("turns.at(-1).content += '!'")
    page.click("#save")
    shows(page, ".error >> nth=-1", re.compile("came out differently"))
    page.evaluate("turns.at(-1).content = turns.at(-1).content.slice(0, -1)")
    page.click("#save")
    answers = page.locator(".assistant").all_text_contents()
    text = f"System: Be short.\n\nUser: Hi\n\nAssistant: {answers[0]}\n\nUser: More\n\nAssistant:{answers[1]}\n\n"
    shows(page, "#ended", f"saved as talk, at position {1 + len(text)}")
    expected = gecko.generate(model, [256, *text.encode()], max_new_tokens=0).state
    saved = gecko.GeckoState.load(tmp_path / "talk.state")
    assert all(torch.allclose(one, saved.tensors()[name], atol=1e-4) for name, one in expected.tensors().items())
    page.reload()
    page.wait_for_selector("#memory")
    page.select_option("#memory", "talk")
    fill(page, tokens=7)
    say(page, "Who?")
    assert position(page) == saved.position[0] + len("User: Who?\n\nAssistant:") + 7

"""Take the pictures of README: the chat page of a fine-tuned model, and the report of a run.

    python benchmarks/screenshots.py runs/chat runs/demo    # docs/pictures/chat.png and report.png

Needs Chromium, and the extra ``dev`` for Playwright. ``runs/chat`` is the model of the tutorial.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
QUESTIONS = ("What does a frog do?", "And the lion?", "Which sound has a cow?")
PORT = 8765


def chat_page(page: Any, model: Path) -> None:
    """Ask a served model three questions."""
    command = [sys.executable, "-m", "gecko", "serve", str(model), "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://127.0.0.1:{PORT}/health")
            page.goto(f"http://127.0.0.1:{PORT}")
            page.fill("#temperature", "0")
            for question in QUESTIONS:
                page.fill("#prompt", question)
                page.click("#send")
                page.wait_for_selector("#send:text-is('Send')")
            page.screenshot(path=PICTURES / "chat.png")
        finally:
            server.terminate()


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"{url} did not answer within a minute")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chat", type=Path, help="run or folder of a model that was fine-tuned on chats")
    parser.add_argument("run", type=Path, help="training run with a report.html")
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 560})
        chat_page(page, arguments.chat)
        page.goto((arguments.run.resolve() / "report.html").as_uri())
        page.screenshot(path=PICTURES / "report.png")
        browser.close()


if __name__ == "__main__":
    main()

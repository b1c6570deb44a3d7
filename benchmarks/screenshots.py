"""Take the pictures of README and docs: the chat page of two models, and the report of a run.

    python benchmarks/screenshots.py --chat runs/chat           # docs/pictures/chat.png: the model of the tutorial
    python benchmarks/screenshots.py --smollm2 models/smollm2   # docs/pictures/chat_smollm2.png
    python benchmarks/screenshots.py --report runs/demo         # docs/pictures/report.png

Needs Chromium, and the extra ``dev`` for Playwright.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from measuring import parser_of, serving

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
QUESTIONS = {
    "chat": ("What does a frog do?", "And the lion?", "Which sound has a cow?"),
    "chat_smollm2": ("What is the capital of France?", "Name three things to see there."),
}


def chat_page(page: Any, picture: str, model: Path) -> None:
    """Ask a served model the questions of a picture."""
    with serving(model) as (_, port):
        page.goto(f"http://127.0.0.1:{port}")
        page.fill("#temperature", "0")
        for question in QUESTIONS[picture]:
            page.fill("#prompt", question)
            page.click("#send")
            page.wait_for_selector("#send:text-is('Send')")
        page.screenshot(path=PICTURES / f"{picture}.png")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = parser_of(__doc__, write=False)
    parser.add_argument("--chat", type=Path, help="run or folder of a model that was fine-tuned on chats")
    parser.add_argument("--smollm2", type=Path, dest="chat_smollm2", help="folder of gecko convert smollm2")
    parser.add_argument("--report", type=Path, help="training run with a report.html")
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 560})
        for picture in QUESTIONS:
            if model := getattr(arguments, picture):
                chat_page(page, picture, model)
        if arguments.report:
            page.goto((arguments.report.resolve() / "report.html").as_uri())
            page.screenshot(path=PICTURES / "report.png")
        browser.close()


if __name__ == "__main__":
    main()

"""The programs in ``examples/`` run, one after the other, at a small size."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
from support.chats import some_chats, write_chats

import gecko

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("steps=2", "model.num_layers=2", "model.model_dim=32", "model.key_dim=16", "model.value_dim=32",
         "model.num_heads=2", "model.ffn_dim=32", "model.cema_modes=4", "model.chunk_size=8", "model.timestep_groups=4",
         "sequence_length=64", "sample.tokens=2", "device=cpu")  # fmt: skip


def run_example(name: str, *arguments: object) -> str:
    """Run a program in this process, which has imported PyTorch already; return what it prints."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(gecko.__file__).parents[1]))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return written.getvalue()


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "book.txt"
    path.write_text("Once upon a time a gecko read a book. " * 200)
    return path


@pytest.fixture(scope="module")
def trained(book: Path) -> Path:
    run = book.with_name("run")
    assert "held-out loss: " in run_example("train_on_text.py", book, run, *SMALL)
    return run


@pytest.fixture(scope="module")
def tuned(trained: Path) -> Path:
    chats = write_chats(trained.with_name("chats.jsonl"), some_chats(12))
    run = trained.with_name("chat")
    written = run_example("finetune_on_chats.py", trained, chats, run, "steps=2", "sample.tokens=2", "device=cpu")
    assert "you> Say cat.\nmodel> " in written and "you> Are you sure?" in written
    assert (run / "talk.state").is_file()
    return run


def test_generate_and_stream(trained: Path) -> None:
    written = run_example("generate_and_stream.py", trained, "Once ", 10)
    assert written.startswith("1: ") and "\n2: " in written and "\nOnce " in written


def test_state_of_a_book(trained: Path, book: Path) -> None:
    written = run_example("state_of_a_book.py", trained, book, book.with_name("book.state"))
    assert f"read {book.stat().st_size + 1:,} tokens" in written
    assert "In short, " in written


def test_serve_and_ask(tuned: Path) -> None:
    pytest.importorskip("openai")
    assert run_example("serve_and_ask.py", tuned, "Say cat.", 5).endswith("\n")


def test_every_example_is_named_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    assert all(path.name in readme for path in EXAMPLES.glob("*.py"))

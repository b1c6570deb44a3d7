"""A quarter of an hour of a card: an item that fails, hangs or is late loses nothing of the others, every result is in
the file at once, and variants win only if they are right."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from gpu import quarter_hour, variants
from gpu.decoding import bytes_of_states
from gpu.items import Item
from gpu.operators import GECKO, Floor, Operator, is_wrong, yardstick
from gpu.page import page
from gpu.record import Record, Row, noted
from gpu.timing import Bench
from kernels.compiling import compiled
from kernels.recording import Configuration
from torch._library.custom_ops import OPDEFS
from triton.backends.compiler import GPUTarget

from gecko.config import GeckoConfig
from gecko.ops.backends import dispatch
from gecko.ops.backends.dispatch import Launch
from gecko.state import GeckoState

FACTS = {"table": "facts", "command": "a command", "hardware": "Card; 1 core", "repeats": 1, "warm_ups": 1}


class Card(Bench):
    """A card with a gigabyte."""

    memory = 1e9


CARD = Card(torch.device("cpu"))
ROOT = Path(__file__).parents[2]


def results(*values: float, error: BaseException | None = None, late: bool = False) -> Iterator[Row]:
    for value in values:
        yield noted("number", value, "m")
    if error is not None:
        raise error
    while late:
        try:
            time.sleep(0.1)
        except Exception:  # as code does that goes on after errors
            continue


def item(name: str, *values: float, limit: float = 60.0, needs: float = 0.0, **how: object) -> Item:
    return Item(name, limit, lambda: results(*values, **how), needs)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    record = Record(tmp_path / "card.jsonl")
    record.add("a command", FACTS)
    return record


def values(record: Record) -> list[float]:
    return [x["value"] for x in record.rows("other")]


def ended(record: Record) -> dict[str, str]:
    return {x["item"]: x["ended"] for x in record.rows("items")}


def restarted() -> None:
    raise AssertionError("the process began anew")


def test_an_item_loses_only_what_was_left_of_it(record):
    items = [
        item("first", 1.0), item("fails", 2.0, error=ValueError("a | b")), item("exits", error=SystemExit(3)),
        item("late", 3.0, limit=0.3, late=True), item("large", needs=2e9), item("last", 4.0),
    ]  # fmt: skip
    quarter_hour.run(items, record, time.time() + 600, CARD, restarted)
    assert values(record) == [1.0, 2.0, 3.0, 4.0]
    how = ended(record)
    assert how["fails"] == "failed, ValueError: a | b" and how["exits"] == "failed, SystemExit"
    assert how["late"] == "stopped after 0 s" and "needs a card with 2 GB" in how["large"]
    assert how["first"] == how["last"] == "measured"
    text = "\n".join(page(record))
    assert "| number | 4 | m |" in text and "stopped after 0 s" in text and "failed, ValueError: a / b" in text


def test_what_no_time_is_left_for_is_named_and_what_ended_is_not_measured_again(record):
    quarter_hour.run([item("first", 1.0)], record, time.time() + 600, CARD, restarted)
    quarter_hour.run([item("first", 2.0), item("second", 3.0)], record, time.time() + 1, CARD, restarted)
    assert values(record) == [1.0] and ended(record)["second"] == "no time was left"


def test_a_device_that_does_not_answer_begins_the_process_anew(record, monkeypatch):
    begun = []
    monkeypatch.setattr(Bench, "settle", Mock(side_effect=RuntimeError("illegal address")))
    quarter_hour.run([item("first", 1.0)], record, time.time() + 600, CARD, lambda: begun.append(True))
    assert begun == [True] and "does not answer: illegal address" in ended(record)["first"]


HANGS = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import torch
from gpu import quarter_hour
from gpu.items import Item
from gpu.record import Record, noted
from gpu.timing import Bench
quarter_hour.GRACE = 0.5

def hangs():
    yield noted("before", 1.0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # a call into a driver hears no signal
    time.sleep(1_000)

def last():
    yield noted("after", 2.0)

record = Record(Path(sys.argv[1]))
items, bench = [Item("hangs", 0.5, hangs), Item("last", 60, last)], Bench(torch.device("cpu"))
quarter_hour.run(items, record, time.time() + 600, bench,
                 lambda: os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]]))
"""


def test_a_process_that_hangs_begins_anew_with_the_next_item(tmp_path):
    script, lines = tmp_path / "hangs.py", tmp_path / "card.jsonl"
    script.write_text(HANGS)
    folders = [str(ROOT / name) for name in ("benchmarks", "tests", "src")]
    subprocess.run([sys.executable, str(script), str(lines), *folders], check=True, timeout=300)
    record = Record(lines)
    assert [x["what"] for x in record.rows("other")] == ["before", "after"]
    assert ended(record) == {"hangs": "hung after 0 s", "last": "measured"}


def test_a_line_that_was_cut_off_and_earlier_files_are_read(tmp_path, record):
    for path, value in ((tmp_path / "a.jsonl", 1.0), (tmp_path / "b.jsonl", 2.0)):
        earlier = Record(path)
        earlier.add(path.name, {**FACTS, "command": path.name})
        earlier.add("same", noted("number", value))
        earlier.add(f"of {path.name}", noted("own", value))
    with record.path.open("a") as file:
        file.write('{"table": "other", "item": "cut')
    joined = Record(record.path, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [(x["what"], x["value"]) for x in joined.rows("other")] == [("number", 2.0), ("own", 1.0), ("own", 2.0)]
    assert page(joined)[-1] == "Written by `a.jsonl`, `b.jsonl`, `a command`."


def test_a_decoded_token_reads_and_writes_the_sums_of_its_chunk():
    """The sums over keys and values and the weight, for each head; the moving average; mean and variance of norms."""
    config, norms = GeckoConfig.preset("gecko-1b"), 2
    state = GeckoState.empty(replace(config, num_layers=1), value_dtype=torch.bfloat16, device="meta")
    keys, values = config.key_head_dim, config.value_head_dim
    sums = config.num_heads * (1 + keys + values) * keys + 2 * config.model_dim * config.cema_modes
    statistics = norms * (2 * config.timestep_groups * 4 + 8)  # and a count
    ring = config.num_heads * 2 * config.chunk_size * (4 * keys + 2 * values)
    memory = config.num_heads * keys * (values + 1) * 4
    rest = 2 * 3 * 8 + 2 * 1 - 1  # the clock, and whether the previous chunk starts a document, which is of that chunk
    moved = 2 * (4 * sums + statistics) + memory + 3 / 4 * ring
    assert bytes_of_states(state) == pytest.approx(moved + rest, abs=2)


# ---- Rounding and errors


def compared(monkeypatch: pytest.MonkeyPatch, kernel: object, eager: object, x: torch.Tensor) -> Row:
    """Compare ``kernel`` with ``eager``, where an operator would choose its kernel."""
    monkeypatch.setattr(dispatch, "triton_kernels_run_on", lambda _: True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return (kernel if dispatch.triton_kernels_run_on(x) else eager)(x)

    return yardstick(Operator("an operator", call, [x], Floor(1, 1)))()


def centred(x: torch.Tensor) -> torch.Tensor:
    """Differences of nearly equal numbers: the rounding of x is most of them."""
    return (x + 64) - (x.mean() + 64)


def test_rounding_is_told_apart_from_an_error_of_the_same_size(monkeypatch):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounds = compared(monkeypatch, lambda x: (x + 63.5) - (x.mean() + 63.5), centred, x)
    difference = rounds["difference"][0]
    assert difference > 0.02 and rounds["wrong"] is False
    error = compared(monkeypatch, lambda x: x * (1 + difference), lambda x: x * 1, x)
    assert error["difference"][0] == pytest.approx(difference, rel=0.2) and error["wrong"] is True
    nothing = compared(monkeypatch, lambda x: x * float("nan"), lambda x: x * 1, x)
    assert nothing["wrong"] is True

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such kernel")

    missing = compared(monkeypatch, fails, lambda x: x * 1, x)
    assert missing["wrong"] is None and "no such kernel" in missing["verdict"]


def tried(variant: str, seconds: float, error: float = 2e-3) -> Row:
    wrong = is_wrong((error, error), (2e-3, 2e-3))
    return {
        "table": "variants", "operator": "a norm", "family": "memory chain", "form": variant, "wrong": wrong,
        "difference": [error, error], "seconds": [seconds / 3, seconds], "verdict": "**WRONG**" * wrong,
    }  # fmt: skip


def test_the_fastest_right_variant_wins_if_it_is_ahead_by_more_than_the_spread(record):
    _, *names = (x.name for x in variants.of_family("memory chain"))
    assert variants.won([tried(GECKO, 1.0), tried(names[0], 0.98)]) == []
    found = [tried(GECKO, 1.0), tried(names[0], 0.5, error=0.5), tried(names[1], 0.9)]
    assert [x.name for x in variants.won(found)] == [names[1]]
    assert variants.won([tried(names[1], 0.9)]) == []
    for x in found:
        record.add(f"variants: {x['form']}", x)
    text = "\n".join(page(record))
    assert text.count("**wins**") == 1 and "5.0e-01 / 5.0e-01 |  | **WRONG** |" in text
    assert "Not what the eager form computes: a norm" in text


VARIANTS = [*variants.VARIANTS, *variants.OF_DECODING, variants.WITHOUT_BARRIERS]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_edit_code_that_is_there(variant):
    codes = [variants.edited(variant.edits, str(variant), module) for module in variant.edits]
    for name in variant.kernels if codes else ():
        assert any(callable(getattr(getattr(code, name.partition(".")[2], None), "fn", None)) for code in codes)


def test_edited_copies_leave_the_operators_registered_and_edit_code_that_is_there():
    """PyTorch destroys an operator whose name is registered again; calls of it then crash or find no memory."""
    from gecko.ops.qk_scale_shift.triton import _qk_scale_shift

    variants.edited({"qk_scale_shift.triton": ()}, "again", "qk_scale_shift.triton")
    assert OPDEFS["gecko::qk_scale_shift"] is _qk_scale_shift.registered
    with pytest.raises(ValueError, match=r"must occur in loss\.triton"):
        variants.edited({"loss.triton": (("no such code", ""),)}, "gone", "loss.triton")


def test_applied_variants_change_what_is_launched(monkeypatch):
    seen: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: seen.append(launch))
    variant = next(x for x in variants.OF_DECODING if str(x) == "values: 4 warps")
    from gecko.ops.decoding.triton_mixer import mix_kernel

    launch = Launch(mix_kernel, (1,), {}, 8)
    with variants.applied(variant):
        launch.run()
    launch.run()
    assert [x.warps for x in seen] == [4, 8]


# ---- Kernels that were compiled beforehand


@triton.jit
def _copy(p_x, p_y, size: tl.constexpr):
    tl.store(p_y + tl.arange(0, size), tl.load(p_x + tl.arange(0, size)))


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from gpu.beforehand import Driver

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    yield
    triton.runtime.driver._active = before


def test_what_was_recorded_and_compiled_is_found_by_a_launch_and_misses_are_counted(card):
    arguments = {"p_x": torch.empty(128), "p_y": torch.empty(128), "size": 128}
    assert triton.runtime.driver.active.get_current_target() == GPUTarget("cuda", 90, 32)
    compiled(Configuration.of(Launch(_copy, (1,), arguments, warps=2)), 90)
    found: list[str] = []
    with quarter_hour.misses(found):
        _copy.warmup(**arguments, grid=(1,), num_warps=2, num_stages=1)
        assert found == []
        _copy.warmup(**arguments, grid=(1,), num_warps=4, num_stages=1)
    assert found == ["_copy"]

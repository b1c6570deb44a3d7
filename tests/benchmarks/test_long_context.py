"""Which form of the memory uses the past: the kinds of bytes, what is compared, and the command."""

from __future__ import annotations

import sys
from pathlib import Path

import capacity
import evidence
import long_context
import numpy as np
import pytest
import tables
import torch

from gecko.config import GeckoConfig
from gecko.models import Gecko

KINDS = long_context.KINDS


def test_a_name_is_repeated_if_it_was_used_beyond_the_near_past_only() -> None:
    text = b"known first" + b" " * 30 + b"first" + b" " * long_context.NEAR + b"first second first"
    repeated, new, other = long_context.kinds(text, {b"known"})
    end = len(text) - len(b"first second first")
    assert np.flatnonzero(repeated).tolist() == list(range(end, end + 5))
    assert np.flatnonzero(new).tolist() == [*range(6, 11), *range(end + 6, end + 12)]
    assert not (repeated & new).any() and other[:6].all() and not other[41:46].any() and not other[-5:].any()


@torch.no_grad()
def test_bytes_are_read_with_their_past_and_without() -> None:
    torch.manual_seed(0)
    model = Gecko(GeckoConfig.preset("tiny", num_layers=1)).eval()
    texts = torch.randint(256, (2, long_context.NEAR + 300), dtype=torch.uint8)
    whole, near = long_context.byte_losses(model, texts)
    rows = torch.cat([torch.full((2, 1), 256), texts.long()], 1)
    expected, _ = model.token_losses(rows[:, :-1], rows[:, 1:])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    rows[:, long_context.NEAR] = 256
    expected, _ = model.token_losses(rows[:, long_context.NEAR : -1], rows[:, long_context.NEAR + 1 :])
    torch.testing.assert_close(near[:, long_context.NEAR :], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(near[:, : long_context.NEAR], whole[:, : long_context.NEAR])


def fill(form: str, seed: int, repeated: float, new: float, steps: int = long_context.STEPS) -> None:
    table = tables.Table("past.csv", long_context.COLUMNS)
    for number, package in enumerate(long_context.TEST):
        losses = [100, repeated + number / 10, 3.0, 50, new + number / 10, 3.0, 900, 2.0, 2.0]
        table.add([("test", form, seed, "0.008", steps, package, *losses, "abcdefgh", "abcdefg", "a", "x")])


@pytest.mark.parametrize(
    ("repeated", "new", "uses"),
    [(2.4, 2.9, True), (2.4, 2.8, False), (2.495, 2.9, False), (2.55, 3.0, False)],
    ids=["repeated names", "all names", "within the margin", "new names became worse"],
)  # fmt: skip
def test_a_form_uses_the_past_if_it_leads_on_repeated_names_alone(
    repeated: float, new: float, uses: bool, results: Path
) -> None:
    assert "Not run" in long_context.table() and evidence.past()[1:] == ("not run", "open")
    for form in long_context.NAMES:
        for seed in range(3):
            control = form in (capacity.NONE, capacity.LINEAR)
            fill(form, seed, (2.5 if control else repeated) + seed / 1000, 2.9 if control else new)
    assert long_context.uses_the_past(capacity.PAPER) is uses and not long_context.uses_the_past(capacity.LINEAR)
    verdict = evidence.past()[2]
    assert (capacity.PAPER in verdict) is uses and capacity.LINEAR not in verdict
    lead = (2.5 - repeated) - (2.9 - new)
    assert f"| {-(2.5 - repeated):+.4f} [{-(2.5 - repeated):+.4f}, {-(2.5 - repeated):+.4f}] | {lead:+.4f} [" in (
        long_context.table()
    )


def test_a_seed_without_all_packages_is_missing(results: Path) -> None:
    for form in (capacity.NONE, capacity.PAPER):
        fill(form, 0, 2.4, 2.9)
        fill(form, 1, 2.4, 2.9, steps=10)
    lines = (results / "past.csv").read_text().splitlines()
    assert evidence.past()[2] == f"open: {3 * len(long_context.NAMES) - 2} runs are missing"
    (results / "past.csv").write_text("\n".join(line for line in lines if "werkzeug" not in line) + "\n")
    assert evidence.past()[1:] == ("not run", "open")


def test_the_rate_is_that_of_the_tuning_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(split: str, rate: float, loss: float) -> list[dict[str, str]]:
        of = {f"{kind}{end}": str(value) for kind in KINDS for end, value in ((" bytes", loss and 10), ("", loss))}
        run = {"split": split, "form": "linear", "rate": str(rate), "steps": str(long_context.TUNING_STEPS), **of}
        return [{**run, "package": name} for name in long_context.TUNING]

    def tuned(*runs: list[dict[str, str]]) -> float | None:
        monkeypatch.setattr(long_context, "rows_of", lambda _: [row for of in runs for row in of])
        return long_context.tuned("linear")

    runs = [rows("tuning", rate, loss) for rate, loss in zip(long_context.RATES, (2.0, 1.5, 1.75), strict=True)]
    runs += [rows("test", long_context.RATES[0], 1.0)]
    assert tuned(*runs) == long_context.RATES[1]
    assert tuned(*runs[1:]) is None and tuned(runs[0][:-1], *runs[1:]) is None
    assert tuned(rows("tuning", long_context.RATES[0], float("nan")), *runs[1:]) == long_context.RATES[1]


def test_texts_of_all_packages_are_needed_and_the_same(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = results / "source"
    for split, names in (("test", long_context.TEST), ("tuning", long_context.TUNING), ("train", ("all",))):
        (source / split).mkdir(parents=True)
        for name in names:
            (source / split / f"{name}.txt").write_text(name)
    arguments = ["--source", str(source), "--out", str(results), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["long_context.py", *arguments])
    with pytest.raises(ValueError, match=r"must have at least 262,144 bytes; .*'rich'\] have less"):
        long_context.main()
    monkeypatch.setattr(long_context, "LENGTH", 1)
    fill(capacity.NONE, 0, 2.4, 2.9)
    with pytest.raises(ValueError, match=r"it has others of \['abcdefgh'\]"):
        long_context.main()
    before = long_context.digest(source)
    (source / "train/all.txt").write_text("other")
    assert long_context.digest(source) != before
    (source / "tuning/rich.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"it lacks \['rich'\]"):
        long_context.main()

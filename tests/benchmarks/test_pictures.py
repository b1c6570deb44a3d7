"""The pictures of docs/how_it_works.md and docs/evidence.md are those that their script draws."""

from __future__ import annotations

from pathlib import Path

import capacity
import ladder
import pictures
import tables


def test_the_pictures_are_what_the_script_draws() -> None:
    for draw in pictures.drawn():
        svg = (pictures.PICTURES / f"{draw.__name__}.svg").read_text(encoding="utf-8")
        assert svg == draw().svg(), "run: python benchmarks/pictures.py --write"


def test_forms_are_drawn_by_bytes_of_state(results: Path) -> None:
    assert pictures.memory_capacity not in pictures.drawn()
    assert pictures.ladder_changes().svg().count("not run") == len(ladder.RUNGS) - 1
    table = tables.Table("capacity.csv", capacity.COLUMNS)
    for form in (capacity.PAPER, capacity.LINEAR):
        for width, recall in ((16, 0.25), (32, 1.0)):
            table.add([(*capacity.Cell(form, 4, width, 0, 1e-2).key, recall, 1, 9, "abcdefg", "a", "x")])
    svg = pictures.memory_capacity().svg()
    assert pictures.memory_capacity in pictures.drawn() and svg.count(f">{capacity.LINEAR}<") == 1
    assert svg.count('points="70.0,232.5 196.7,60.0"') == 2 and ">4K<" in svg and ">32K<" in svg

"""The pictures of docs/how_it_works.md are those that their script draws."""

from __future__ import annotations

import pictures


def test_the_pictures_are_what_the_script_draws() -> None:
    for draw in (pictures.layer, pictures.window, pictures.state_size, pictures.speed):
        svg = (pictures.PICTURES / f"{draw.__name__}.svg").read_text(encoding="utf-8")
        assert svg == draw().svg(), "run: python benchmarks/pictures.py --write"

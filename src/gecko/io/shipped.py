"""Trained models that are installed with the package, so that a model can be tried without a network.

A shipped model is a model folder inside the package: ``gecko/shipped/NAME``, with its model card (``README.md``), and
the recipe that trained it. Everything that takes a model folder also takes its name: ``gecko.load("books")``.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "shipped"
_FILES = ("config.json", "model.safetensors", "recipe.json", "sessions.jsonl", "checkpoints")
"""Files by which a folder is known as a model or a run, even if others are missing."""


def shipped_models() -> list[str]:
    """Return the names of the models that are installed with the package."""
    return sorted(entry.name for entry in FOLDER.glob("*") if (entry / "config.json").is_file())


def shipped_folder(name: str | Path) -> Path | None:
    """Return the folder of the shipped model ``name``; None if there is none, or if a model or run here has this name.

    Another file or folder of this name, such as one with texts, does not hide the shipped model.
    """
    if str(name) not in shipped_models() or any((Path(name) / file).exists() for file in _FILES):
        return None
    return FOLDER / name

"""The files of a tokenizer, under the names that they have beside a model."""

from __future__ import annotations

import shutil
from pathlib import Path

from gecko.data.tokenizers import ByteTokenizer
from gecko.files import whole_file

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Of a folder with both, ``load_tokenizer`` takes the first."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What may lie beside one of them and says how to use it."""


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def copy_tokenizer(spec: str, folder: Path) -> None:
    """Write the files of the tokenizer ``spec`` names to ``folder``, each whole, in place of another tokenizer's.

    There are none of the bytes, and of a tokenizer of the hub, which has its name everywhere.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = _tokenizer_files(spec)
    for name, path in files.items():
        with whole_file(folder / name) as temporary:
            shutil.copyfile(path, temporary)
    for name in {*TOKENIZERS, *SETTINGS} - files.keys():
        (folder / name).unlink(missing_ok=True)


def _tokenizer_files(spec: str) -> dict[str, Path]:
    """Only the one of ``TOKENIZERS`` that is read: beside a model, the other would be taken in its place."""
    path = Path(spec).expanduser()
    if path.is_dir():
        path = next((path / name for name in TOKENIZERS if (path / name).is_file()), path)
    if spec == ByteTokenizer.name or not path.is_file():
        return {}
    beside = {name: path.with_name(name) for name in SETTINGS if path.with_name(name).is_file()}
    return {"tokenizer.model" if path.suffix == ".model" else "tokenizer.json": path, **beside}

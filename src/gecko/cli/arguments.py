"""Inputs of commands: models with their tokenizers, and texts of any length; and the progress of reading them."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from gecko.data import Tokenizer, check_vocabulary, load_tokenizer
from gecko.data.readers import COMPRESSED_SUFFIXES, check_plain_text, read_pieces
from gecko.data.tokenizers import TOKENIZERS, known_tokenizer
from gecko.inference import encode_stream
from gecko.io.checkpoints import CHECKPOINTS, list_checkpoints, model_folder, shipped_folder, shipped_models
from gecko.io.files import found_at
from gecko.io.model_folder import CONFIG
from gecko.io.quantization import is_quantized
from gecko.models import PRESETS, LanguageModel, LlamaConfig, load_any, load_config
from gecko.models.gecko import Gecko
from gecko.runtime.terminal import Terminal, visible

if TYPE_CHECKING:
    from gecko.data.tokenize import TokenizingPlan

RECIPE = "recipe.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TRAIN_ONE = " `gecko train tiny --out runs/demo` trains a model."
_NAME_IT = "Name it yourself: --tokenizer bytes, or the path of a tokenizer.json."


def find_model(name: str) -> Path:
    """Return the folder that holds the model's files. For a training run this is its newest valid checkpoint.

    The name of a shipped model stands for its folder, if no model or run here has this name.
    """
    if not name.strip():
        raise FileNotFoundError(f"MODEL must name a model's folder or a training run; got {name!r}.{_TRAIN_ONE}")
    folder = shipped_folder(name) or Path(name).expanduser()
    if not (folder / CONFIG).is_file() and not list_checkpoints(folder / CHECKPOINTS):
        raise FileNotFoundError(_no_model_message(folder))
    return model_folder(folder)


def find_tokenizer(folder: Path, given: str | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer ``given``; if None, the one in the model's folder; else the one that its recipe names."""
    recipe, known = folder / RECIPE, known_tokenizer(folder) if given is None else given
    if known is None:
        raise FileNotFoundError(
            f"the model's tokenizer must lie beside it ({' or '.join(TOKENIZERS)}) or be named by {recipe}, "
            f"which training writes; there is neither. {_NAME_IT}"
        )
    try:
        tokenizer = load_tokenizer(known)
    except FileNotFoundError as error:
        if given is not None:
            raise
        raise FileNotFoundError(f"the tokenizer that {recipe} names is not here: {error} {_NAME_IT}") from error
    check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def find_gecko(name: str) -> Path:
    """Return ``find_model(name)``; raise ValueError if the model is a Llama."""
    folder = find_model(name)
    if isinstance(load_config(folder / CONFIG), LlamaConfig):
        raise ValueError(
            f"MODEL must be a Gecko, because this command uses its blocks and states; {name} is a Llama. "
            "Use it with gecko eval, gecko info or transformers."
        )
    return folder


def load_any_model(
    name: str, tokenizer: str | None, device: str, dtype: str | None = None, find: Callable[[str], Path] = find_model
) -> tuple[LanguageModel, Tokenizer]:
    """Load a Gecko or a Llama and its tokenizer for inference, from the values of a command's options."""
    from gecko.train.throughput import select_device

    wanted = None if dtype is None else named_dtype(dtype)
    folder = find(name)
    model = load_any(folder)
    if wanted is not None and any(map(is_quantized, model.parameters())):
        raise ValueError("--dtype is for models that are not quantised; this one is. Leave it out.")
    model.to(device=select_device(device), dtype=wanted)
    return model, find_tokenizer(folder, tokenizer, model.config.vocab_size)


def load_gecko(name: str, tokenizer: str | None, device: str, dtype: str | None = None) -> tuple[Gecko, Tokenizer]:
    model, found = load_any_model(name, tokenizer, device, dtype, find_gecko)
    assert isinstance(model, Gecko)
    return model, found


def named_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {name!r}.")
    return DTYPES[name]


def _no_model_message(folder: Path) -> str:
    expected = f"MODEL must be a folder that holds a model ({CONFIG}) or a training run (checkpoints/)"
    if folder.is_dir() or folder.is_file():
        held, hint = "is a file", " The MODEL comes first; a text to continue is given by --file after it."
        if folder.is_dir():
            names = sorted(entry.name for entry in folder.iterdir())
            held = f"holds {', '.join(names[:8]) or 'nothing'}"
            hint = f" Its {CHECKPOINTS}/ has no checkpoint yet." if CHECKPOINTS in names else ""
        around = (up for up in folder.parents if (up / CONFIG).is_file() or list_checkpoints(up / CHECKPOINTS))
        run = next(around, None)
        return f"{expected}; {folder} {held}.{f' Did you mean {run}?' if run else hint}"
    if folder.name in PRESETS:
        return f"{expected}; {folder} is the name of an architecture without weights.{_TRAIN_ONE}"
    shipped = f" Models installed with the package: {', '.join(shipped_models())}."
    there = f"{folder}: {found_at(folder)}" if os.path.lexists(folder) else f"there is no {folder}"
    return f"{expected}; {there}.{nearest_hint(folder) or _TRAIN_ONE}{shipped}"


def nearest_hint(path: Path) -> str:
    """Return a sentence that suggests an existing path with a similar name; an empty string if there is none."""
    if os.path.lexists(path) or not path.name:
        return ""
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.with_name(near[0])}?" if near else ""


STANDARD_INPUT = "-"
BLOCK_BYTES = 4096
"""Bytes that are read between two checks for Ctrl-C."""


@dataclass(frozen=True)
class InputText:
    """A text that is read once, in pieces: its name in error messages, and its size in bytes if it is known."""

    name: str
    pieces: Iterable[bytes]
    size: int | None


def named_text(source: str) -> InputText:
    """Open a file of plain text, which is decompressed according to its suffix, or standard input (``-``)."""
    if source == STANDARD_INPUT:
        return InputText("standard input", iter(lambda: sys.stdin.buffer.read(1 << 16), b""), None)
    path = Path(source).expanduser()
    if path.is_dir():
        raise IsADirectoryError(
            f"a text must be a file, or - for standard input; {path} is a folder. Name a file in it."
        )
    if not path.is_file():
        there = f"{path}: {found_at(path)}" if os.path.lexists(path) else f"there is no file {path}"
        raise FileNotFoundError(f"a text must be a file, or - for standard input; {there}.{nearest_hint(path)}")
    check_plain_text(path)
    compressed = path.suffix.lower() in COMPRESSED_SUFFIXES
    return InputText(str(path), read_pieces(path), None if compressed else path.stat().st_size)


class TokenReader:
    """Context manager that turns texts into tokens, one text after the other, with a progress bar on a terminal.

    ``stopped`` is called before every block. Once it returns True, the tokens end, after a whole character.
    """

    def __init__(
        self, texts: Sequence[InputText], tokenizer: Tokenizer, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._texts, self._tokenizer, self._stopped = texts, tokenizer, stopped
        self.num_bytes, self.num_tokens = 0, 0
        """Bytes read and tokens returned so far."""
        self.seconds = 0.0
        """Time from the beginning to the end of the context."""
        self.unfinished: tuple[int, int] | None = None
        """Index of the text in which ``stopped`` ended the tokens, and the number of its bytes that were read."""
        self._bar = Progress(
            SpinnerColumn(), TextColumn("reading {task.description}", markup=False), BarColumn(),
            TextColumn("{task.completed:,.0f} bytes, {task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn(),
            console=Terminal(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._begin = time.perf_counter()

    def __enter__(self) -> TokenReader:
        sizes = [text.size for text in self._texts if text.size is not None]
        self._task = self._bar.add_task("", total=sum(sizes) if len(sizes) == len(self._texts) else None, speed=0.0)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self.seconds = time.perf_counter() - self._begin

    def tokens(self, *, begin: bool) -> Iterator[Tensor]:
        """Yield the ids of all texts as 1-D tensors; with ``begin`` the document-start token comes first."""
        if begin:
            self.num_tokens += 1
            yield torch.tensor([self._tokenizer.document_start], device="cpu")
        for place, text in enumerate(self._texts):
            self._bar.update(self._task, description=visible(text.name))
            for ids in encode_stream(self._tokenizer, self._blocks(place, text), text.name):
                self.num_tokens += len(ids)
                yield ids
            if self.unfinished is not None:
                return

    def _blocks(self, place: int, text: InputText) -> Iterator[bytes]:
        begin = self.num_bytes
        for block in split_at_characters(text.pieces, BLOCK_BYTES):
            if self._stopped():
                self.unfinished = (place, self.num_bytes - begin)
                return
            self.num_bytes += len(block)
            yield block
            speed = self.num_tokens / (time.perf_counter() - self._begin)
            self._bar.update(self._task, advance=len(block), speed=speed)


def split_at_characters(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the bytes in blocks of about ``size``, none of which ends inside a UTF-8 character."""
    held = b""
    for piece in pieces:
        held, begin = held + piece, 0
        while len(held) - begin > size:
            near = begin + size  # the end, if the data is not text
            places = range(near, near - 4, -1)
            end = next((place for place in places if held[place] & 0b1100_0000 != 0b1000_0000), near)
            yield held[begin:end]
            begin = end
        held = held[begin:]
    if held:
        yield held


class ShardProgress(Progress):
    """The number of finished shards, and of tokens on disk, which are computed from the sizes of the files."""

    def __init__(self, plan: TokenizingPlan, console: Console) -> None:
        columns = (
            TextColumn("tokenizing"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("shards"),
            TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn(),
        )  # fmt: skip
        self._plan = plan  # what is shown is computed at once
        # Listing thousands of files takes long, so large corpora are refreshed less often.
        super().__init__(*columns, console=console, refresh_per_second=2 / (1 + len(plan.tasks) // 1000))
        self.add_task("tokenizing", total=len(plan.tasks), tokens="-")

    def get_renderables(self) -> Iterator[RenderableType]:
        size, records = 0, 0
        with os.scandir(self._plan.folder) as entries:
            for entry in entries:
                # NAME.ds, or .NAME.ds.SUFFIX while it is written.
                kind = entry.name.lstrip(".").split(".")[1:]
                records += kind == ["json"] and entry.name[0].isdigit()
                if kind[:1] == ["ds"] and kind[1:2] not in (["index"], ["bytes"]):
                    with suppress(FileNotFoundError):  # it was renamed meanwhile
                        size += entry.stat().st_size
        for task in self.tasks:
            task.completed, task.fields["tokens"] = records, f"{size // self._plan.tokenizer.dtype.itemsize:,}"
        yield from super().get_renderables()

"""Read the tensors of one of PyTorch's distributed checkpoints. No code in its files is run.

The index of such a checkpoint is pickled. It is read into stand-ins of its classes, which can do nothing; their values
are checked, and the parts of tensors are read from where they say.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",), "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}  # fmt: skip
"""What an index is pickled from, besides dtypes, dictionaries and paths."""
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32")}
_DIMENSIONS = 8


class _Record:
    """Stands for a value of a class that is never made: what it was called with, and its state."""

    given: tuple[object, ...]
    state: object

    def __new__(cls, *given: object) -> _Record:
        record = object.__new__(cls)
        record.given, record.state = given, None
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Index(pickle.Unpickler):
    """Reads an index. Classes are made for this reading alone, so a pickle that changes them changes nothing else."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        for operation, given, _ in pickletools.genops(content):  # a place in the memo is allocated before it is filled
            if "PUT" in operation.name and int(given or 0) > len(content):
                raise pickle.UnpicklingError(f"{operation.name} {given}")
        super().__init__(BytesIO(content))
        self.made: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (dtype := _DTYPES.get(name)):
            return dtype
        if (module, name) == ("collections", "OrderedDict"):
            return type("OrderedDict", (dict,), {"__init__": lambda self: None})
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):  # of another system too
            module, name = "pathlib", "Path"
        elif name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return self.made.setdefault((module, name), type(name, (_Record,), {}))


class _Part(NamedTuple):
    """A part of a tensor, and the file that holds its ``length`` bytes from ``begin`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    begin: int
    length: int


_Stored = tuple[torch.dtype, tuple[int, ...], list[_Part]]
"""Dtype and size of a tensor, and its parts."""


def read_distributed(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a distributed checkpoint by name. What no file fills is NaN or −1.

    Raise FileNotFoundError if there is no index, ValueError if the index or the files hold something else, or the index
    names what the files cannot hold.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must hold a distributed checkpoint; there is no {path}.")
    try:
        found = _Index(path).load()
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(f"{path} must name tensors; it holds something that could be code, or is damaged.") from error
    try:
        stored = _checked(folder, found)
    except ValueError as error:
        raise ValueError(f"{folder} must hold {error}") from None
    filled = {}
    for name, (dtype, size, parts) in stored.items():
        nothing = torch.nan if dtype.is_floating_point else -1
        filled[name] = torch.full(size, nothing, dtype=dtype, device="cpu")
        for part in parts:
            try:
                ends = map(sum, zip(part.offsets, part.sizes, strict=True))
                inside = filled[name][tuple(map(slice, part.offsets, ends))]
                inside.copy_(_read_part(part, inside.shape))
            except Exception as error:  # as damaged pickles do
                raise ValueError(f"{folder} must hold the tensors of its index; {name}: {error}") from error
    return filled


def _read_part(part: _Part, shape: torch.Size) -> Tensor:
    """Return a tensor as torch.save writes it, not compressed: it may not become larger than it is."""
    with part.file.open("rb") as file:
        file.seek(part.begin)
        content = BytesIO(file.read(part.length))
    with zipfile.ZipFile(content) as archive:
        held = archive.infolist()
        if any(one.compress_type for one in held) or sum(one.file_size for one in held) > part.length:
            raise ValueError(f"{part.file.name} is compressed.")
    content.seek(0)
    found = torch.load(content, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor) or found.shape != shape:
        raise ValueError(f"{part.file.name} must hold a tensor of shape {tuple(shape)}; it holds something else.")
    return found


def _checked(folder: Path, found: object) -> dict[str, _Stored]:
    """Return the tensors of an index. ValueError says what ``folder`` must hold."""
    index = _fields("Metadata", found)
    places = dict(_place(folder, *each) for each in _items(index.get("storage_data")))
    tensors = dict(_tensor(name, entry, places) for name, entry in _items(index.get("state_dict_metadata")))
    files = {file for file, _, _ in places.values()}
    if other := [file.name for file in files if file.is_symlink() or (file.exists() and not file.is_file())]:
        raise ValueError(f"its own files; {other[0]} is a link or no file.")
    sizes = (math.prod(size) * dtype.itemsize for dtype, size, _ in tensors.values())
    if sum(sizes) > sum(file.stat().st_size for file in files if file.is_file()):
        raise ValueError("the tensors of its index; its files are smaller.")
    return tensors


def _place(folder: Path, key: object, info: object) -> tuple[object, tuple[Path, int, int]]:
    """Return name and offsets of a part of a tensor, and where it is, which must be in a file of the folder."""
    part, place = _fields("MetadataIndex", key), _fields("_StorageInfo", info)
    file, name, offset = place.get("relative_path"), part.get("fqn"), part.get("offset")
    if type(file) is not str or not file or file == ".." or Path(file).name != file:
        told = file[:100] if isinstance(file, str) else type(file).__name__
        raise ValueError(f"its own files; it refers to {told!r}.")
    if not isinstance(name, str) or place.get("transform_descriptors"):
        raise ValueError(f"tensors as they are; {name} in {file} is none, or was transformed.")
    begin, length = _size([place.get("offset"), place.get("length")])
    return (name, None if offset is None else _size(offset)), (folder / file, begin, length)


def _tensor(name: object, entry: object, places: dict[object, tuple[Path, int, int]]) -> tuple[str, _Stored]:
    if not isinstance(name, str) or type(entry).__name__ != "TensorStorageMetadata":
        raise ValueError(f"tensors only; {str(name)[:100] if isinstance(name, str) else ''} is none.")
    fields = _fields("TensorStorageMetadata", entry)
    properties, chunks = fields.get("properties"), fields.get("chunks")
    state = properties.state if isinstance(properties, _Record) else None
    if type(state) is not tuple or not state or state[0] not in _DTYPES.values() or type(chunks) is not list:
        raise ValueError(f"tensors only; {name} has no dtype or no chunks.")
    if len(chunks) != len(set(map(id, chunks))):
        raise ValueError(f"each part of {name} once; its index repeats one.")
    size, parts = _size(fields.get("size")), []
    for chunk in (_fields("ChunkStorageMetadata", chunk) for chunk in chunks):
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if (name, offsets) not in places:
            raise ValueError(f"the tensors of its index; a part of {name} has no place.")
        parts.append(_Part(offsets, sizes, *places[name, offsets]))
    return name, (state[0], size, parts)


def _fields(kind: str, found: object) -> dict[str, object]:
    if not isinstance(found, _Record) or type(found).__name__ != kind or type(found.state) is not dict:
        raise ValueError(f"the index of a distributed checkpoint; it has no {kind} in its place.")
    return found.state


def _items(found: object) -> list[tuple[object, object]]:
    if not isinstance(found, dict):
        raise ValueError("the index of a distributed checkpoint; it names no tensors or places.")
    return list(dict.items(found))


def _size(found: object) -> tuple[int, ...]:
    """Return whole numbers that are not negative."""
    numbers = found.given[0] if isinstance(found, _Record) and len(found.given) == 1 else found
    if (
        not isinstance(numbers, tuple | list)
        or len(numbers) > _DIMENSIONS
        or not all(type(n) is int and n >= 0 for n in numbers)
        or math.prod(max(n, 1) for n in numbers) >= 2**62
    ):
        raise ValueError(f"sizes as up to {_DIMENSIONS} whole numbers; it holds something else or too much.")
    return tuple(numbers)

"""Read the tensors of one of PyTorch's distributed checkpoints. No code in its files is run.

The index of such a checkpoint is pickled. It is read into stand-ins of its classes, which can do nothing, and PyTorch
gets an index that is made from their checked values.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

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


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: object) -> NoReturn:
        """Refuse what is no tensor: the method of the base class unpickles it."""
        raise TypeError(f"{read_item.storage_index.fqn} is no tensor.")


class _CheckedFolder(FileSystemReader):
    """Reads the files of a folder by an index that was checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self.index = index

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        """Return a tensor as torch.save writes it, not compressed: it may not become larger than it is."""
        content = BytesIO(super()._slice_file(file, sinfo).read())
        with zipfile.ZipFile(content) as parts:
            held = parts.infolist()
            if any(part.compress_type for part in held) or sum(part.file_size for part in held) > sinfo.length:
                raise TypeError(f"{sinfo.relative_path} is compressed.")
        content.seek(0)
        return content

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


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
        tensors, places = _checked(folder, found)
    except ValueError as error:
        raise ValueError(f"{folder} must hold {error}") from None
    blank = {}
    for name, entry in tensors.items():
        dtype = entry.properties.dtype
        nothing = torch.nan if dtype.is_floating_point else -1
        blank[name] = torch.full(entry.size, nothing, dtype=dtype, device="cpu")
    reader = _CheckedFolder(folder, Metadata(dict(tensors), storage_data=places))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        try:
            load(dict[str, Any](blank), storage_reader=reader, planner=_Planner(), no_dist=True)
        except (CheckpointException, LookupError, TypeError, AttributeError, RuntimeError, OSError) as failure:
            cause = next(iter(getattr(failure, "failures", {}).values()), (failure, None))[0]
            raise ValueError(f"{folder} must hold the tensors of its index; {cause}") from failure
    return blank


def _checked(folder: Path, found: object) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, _StorageInfo]]:
    """Return the tensors of an index, and where their parts are. ValueError says what ``folder`` must hold."""
    index = _fields("Metadata", found)
    tensors = dict(_tensor(name, entry) for name, entry in _items(index.get("state_dict_metadata")))
    places = dict(_place(*each) for each in _items(index.get("storage_data")))
    sizes = (math.prod(entry.size) * entry.properties.dtype.itemsize for entry in tensors.values())
    files = {folder / place.relative_path for place in places.values()}
    if other := [path.name for path in files if path.is_symlink() or (path.exists() and not path.is_file())]:
        raise ValueError(f"its own files; {other[0]} is a link or no file.")
    if sum(sizes) > sum(path.stat().st_size for path in files if path.is_file()):
        raise ValueError("the tensors of its index; its files are smaller.")
    return tensors, places


def _tensor(name: object, entry: object) -> tuple[str, TensorStorageMetadata]:
    if not isinstance(name, str) or type(entry).__name__ != "TensorStorageMetadata":
        raise ValueError(f"tensors only; {str(name)[:100] if isinstance(name, str) else ''} is none.")
    fields = _fields("TensorStorageMetadata", entry)
    properties, chunks = fields.get("properties"), fields.get("chunks")
    state = properties.state if isinstance(properties, _Record) else None
    if type(state) is not tuple or not state or state[0] not in _DTYPES.values() or type(chunks) is not list:
        raise ValueError(f"tensors only; {name} has no dtype or no chunks.")
    if len(chunks) != len(set(map(id, chunks))):
        raise ValueError(f"each part of {name} once; its index repeats one.")
    parts = (_fields("ChunkStorageMetadata", chunk) for chunk in chunks)
    laid = [ChunkStorageMetadata(_size(x.get("offsets")), _size(x.get("sizes"))) for x in parts]
    return name, TensorStorageMetadata(TensorProperties(state[0]), _size(fields.get("size")), laid)


def _place(key: object, info: object) -> tuple[MetadataIndex, _StorageInfo]:
    """Return a part of a tensor and where it is, which must be in a file of the folder."""
    part, place = _fields("MetadataIndex", key), _fields("_StorageInfo", info)
    path, name, offset, number = place.get("relative_path"), *map(part.get, ("fqn", "offset", "index"))
    if type(path) is not str or not path or path == ".." or Path(path).name != path:
        told = path[:100] if isinstance(path, str) else type(path).__name__
        raise ValueError(f"its own files; it refers to {told!r}.")
    if not isinstance(name, str) or not isinstance(number, int | None) or place.get("transform_descriptors"):
        raise ValueError(f"tensors as they are; {name} in {path} is none, or was transformed.")
    at = None if offset is None else _size(offset)
    return MetadataIndex(name, at, number), _StorageInfo(path, *_size([place.get("offset"), place.get("length")]))


def _fields(kind: str, found: object) -> dict[str, object]:
    if not isinstance(found, _Record) or type(found).__name__ != kind or type(found.state) is not dict:
        raise ValueError(f"the index of a distributed checkpoint; it has no {kind} in its place.")
    return found.state


def _items(found: object) -> list[tuple[object, object]]:
    if not isinstance(found, dict):
        raise ValueError("the index of a distributed checkpoint; it names no tensors or places.")
    return list(dict.items(found))


def _size(found: object) -> torch.Size:
    """Return whole numbers that are not negative."""
    numbers = found.given[0] if isinstance(found, _Record) and len(found.given) == 1 else found
    if (
        not isinstance(numbers, tuple | list)
        or len(numbers) > _DIMENSIONS
        or not all(type(n) is int and n >= 0 for n in numbers)
        or math.prod(max(n, 1) for n in numbers) >= 2**62
    ):
        raise ValueError(f"sizes as up to {_DIMENSIONS} whole numbers; it holds something else or too much.")
    return torch.Size(numbers)

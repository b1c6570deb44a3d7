"""Model folders: ``config.json`` and ``model.safetensors``, which ``gecko.load`` and transformers both read.

``save_tensors`` and ``load_tensors`` write and read safetensors files with a checksum. Nothing is pickled. ``fitted``
checks what was read against what the config asks for: C and Triton read weights and states by address, and would
misread a tensor of another shape or dtype, or crash.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gecko.io.files import fitting, found_at, parse_json, read_object, whole_file
from gecko.io.fingerprints import hash_of
from gecko.io.quantization import stored_bits

WEIGHTS, CONFIG = "model.safetensors", "config.json"
"""File names in a model folder."""
INDEX, _SHARD = "model.safetensors.index.json", "model-{:05d}-of-{:05d}.safetensors"
"""File names in a folder whose weights are several files."""
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_CHECKPOINTS, _SESSIONS, _MANIFEST = "checkpoints/step-*", "sessions.jsonl", "manifest.json"
"""Names in the folder of a training run, and in that of a checkpoint."""
FORMAT = "gecko-model-1"
DIGEST = "sha256"
"""Name of the checksum in the metadata of a safetensors file."""
TIED = ("head.weight", "embedding.weight")
"""The parameters that are one tensor if ``tie_embedding`` is set."""
WRAPPERS = ("model.gecko.", "gecko.")
"""Prefixes of a Gecko's parameters in ``GeckoForCausalLM`` and in ``GeckoModel`` of ``gecko.hf``."""


REMEDY = "Restore it from a copy, or write it again."
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which files may store what is computed in any of them."""


class StoredConfig(Protocol):
    """Config of any architecture, as a model folder stores it."""

    @property
    def tie_embedding(self) -> bool: ...

    def to_dict(self) -> dict[str, Any]: ...

    def save(self, path: str | Path) -> None: ...

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self: ...

    @classmethod
    def load(cls, path: str | Path) -> Self: ...


C = TypeVar("C", bound=StoredConfig)


class Layout(NamedTuple):
    """Contents of the model folders of one architecture."""

    format: str
    """Name of the format in the metadata of the weights file."""
    tied: tuple[str, str]
    """Names of the head's weight and of the embedding's, which are one tensor in a tied model."""
    wrappers: tuple[str, ...] = ()
    """Prefixes that parameter names in the file may have; reading removes them."""


GECKO = Layout(FORMAT, TIED, WRAPPERS)


def write_folder(
    folder: str | Path, config: StoredConfig, weights: Mapping[str, Tensor], layout: Layout, prefix: str = "",
    shards: Sequence[Collection[str]] = (),
) -> None:  # fmt: skip
    """Write a model folder of any architecture. A tied head is stored once, as the embedding.

    ``prefix`` is written before every name. ``shards`` has the names of ``weights`` in each of several files, as
    transformers divides them; empty: one file. Raise FileExistsError if the folder is that of a training run, or of a
    checkpoint with weights, ValueError if the config ties weights that differ, OSError if writing failed: existing
    files are unchanged then.
    """
    folder = Path(folder)
    found = run_or_checkpoint(folder)
    # A checkpoint of several ranks has no weights file at first; joining its shards writes one.
    if found == "a training run" or WEIGHTS in _manifest_files(folder):
        raise FileExistsError(
            f"a model must be saved to a folder for itself; {folder} is {found}, whose model it would hide or damage. "
            "Choose another folder."
        )
    head, embedding = layout.tied
    if config.tie_embedding and {head, embedding} <= weights.keys() and not _equal(weights[head], weights[embedding]):
        raise ValueError(
            "head and embedding must be equal if tie_embedding (tie_word_embeddings) is set, because a folder then "
            "holds one of them; they differ. To keep a head trained alone, set it to False in the config before saving."
        )
    kept = {name: w for name, w in weights.items() if not (config.tie_embedding and name == head)}
    bits = stored_bits(kept)
    # transformers 4 and accelerate refuse files whose "format" names no framework. A quantised file must be refused:
    # accelerate skips the names that it does not find in the model, and the model keeps its random weights.
    metadata = {
        "format": "pt" if bits is None else f"gecko-int{bits}",
        "gecko": layout.format,
        "config": json.dumps(config.to_dict()),
    }
    if shards:
        metadata["weights"] = hash_of(kept.items())  # so that files of different models are known
    files = {_SHARD.format(i + 1, len(shards)): names for i, names in enumerate(shards)} or {WEIGHTS: list(kept)}
    with ExitStack() as stack:  # no file is replaced before all are written
        for file, names in files.items():
            temporary = stack.enter_context(whole_file(folder / file))
            _write_tensors(temporary, {prefix + name: kept[name] for name in names}, metadata)
        if shards:
            places = {prefix + name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(weight.nbytes for weight in kept.values())}, "weight_map": places}
            stack.enter_context(whole_file(folder / INDEX)).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        config.save(stack.enter_context(whole_file(folder / CONFIG)))
    # Files that an earlier save wrote, and this one did not replace, go.
    for path in weight_files(folder):
        if path.name not in files:
            path.unlink()
    if WEIGHTS in files:
        (folder / INDEX).unlink(missing_ok=True)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a model folder, in order of their names."""
    return sorted(path for path in folder.glob("model*.safetensors") if _WEIGHT_FILE.fullmatch(path.name))


def _places(folder: Path) -> dict[str, str]:
    """Return the file of every weight of a folder with an index; of one with a single file nothing."""
    if not (folder / INDEX).is_file():
        return {}
    if (folder / WEIGHTS).exists():
        raise ValueError(f"{folder} must hold one model; it holds {WEIGHTS} and {INDEX}. Remove the older one.")
    places = read_object(folder / INDEX, "the names of weights files").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{folder / INDEX} must map names to files under weight_map; it does not. {REMEDY}")
    if strange := [file for file in places.values() if not _WEIGHT_FILE.fullmatch(str(file))]:
        raise ValueError(
            f"{folder / INDEX} must name files of its own folder, as {_SHARD.format(1, 2)}; got {strange[0]!r}."
        )
    return places


def _read_weights(folder: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a folder's weights file or files, by their names there, and the metadata."""
    places = _places(folder)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())) or [WEIGHTS]:
        found, metadata = load_tensors(folder / file)
        kind = metadata.get("gecko", metadata.get("format", "another file"))
        if kind != expected:
            raise ValueError(f"{folder / file} must hold a model's weights ({expected}); it holds {kind}.")
        if places and found.keys() != {name for name, place in places.items() if place == file}:
            raise ValueError(f"{folder / file} must hold the weights that {INDEX} lists; it holds others.")
        tensors |= found
    check_shards(folder)
    return tensors, metadata


def check_shards(folder: Path) -> None:
    """Raise ValueError if the weights files that a folder's index lists are, by their metadata, of several models."""
    files = sorted({folder / file for file in _places(folder).values()})
    known = [{name: value for name, value in _metadata(file).items() if name != DIGEST} for file in files]
    if any(metadata != known[0] for metadata in known):
        raise ValueError(f"the files that {folder / INDEX} lists must be of one model; they are of different ones.")


def _metadata(path: Path) -> dict[str, str]:
    with reading(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def read_folder(folder: str | Path, kind: type[C], layout: Layout) -> tuple[C, dict[str, Tensor]]:
    """Return the config, of class ``kind``, and the weights of a model folder, by their names in the model. Raise
    FileNotFoundError if a file is missing, ValueError if one is damaged, or the folder is that of another model too."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} must be a model's folder with {CONFIG} and {WEIGHTS}; it has no {CONFIG}.")
    check_one_model(folder)
    config = kind.load(folder / CONFIG)
    stored, metadata = _read_weights(folder, layout.format)
    written = stored_config(folder / WEIGHTS, metadata, kind)
    if written != config:
        names = [name for name, value in written.to_dict().items() if config.to_dict()[name] != value]
        raise ValueError(f"{folder / CONFIG} and {folder / WEIGHTS} must describe one model; they differ in {names}.")
    weights = {name.removeprefix(_prefix(name, layout.wrappers)): weight for name, weight in stored.items()}
    head, embedding = layout.tied
    if len(weights) < len(stored) or (config.tie_embedding and head in weights):
        raise ValueError(f"{folder / WEIGHTS} must hold every weight once; it holds one under two names. {REMEDY}")
    if config.tie_embedding and embedding in weights:
        weights[head] = weights[embedding]
    return config, weights


def stored_config(path: Path, metadata: Mapping[str, str], kind: type[C]) -> C:
    """Return the config in the metadata of a file that ``save_tensors`` wrote; ValueError if it is not one."""
    return fitting(path, "the config of its model", lambda: kind.from_dict(parse_json(metadata["config"])))


def stored_prefix(folder: Path) -> str:
    """Return the prefix of the parameter names in a folder's weights file; "" if there is no such file."""
    if not (folder / WEIGHTS).is_file():
        return ""
    with reading(folder / WEIGHTS), safe_open(folder / WEIGHTS, framework="pt") as file:
        return _prefix(next(iter(file.keys()), ""), WRAPPERS)


def _prefix(name: str, wrappers: Collection[str]) -> str:
    return next(filter(name.startswith, wrappers), "")


def run_or_checkpoint(folder: Path) -> str:
    """Return ``a training run`` or ``a checkpoint`` if the folder is one, otherwise an empty string."""
    if (folder / _SESSIONS).is_file() or next(folder.glob(_CHECKPOINTS), None) is not None:
        return "a training run"
    return "a checkpoint" if CONFIG in _manifest_files(folder) else ""


def check_one_model(folder: Path) -> None:
    """Raise ValueError if a training run, whose model is in its checkpoints, also has the files of another model."""
    if run_or_checkpoint(folder) != "a training run" or not (folder / CONFIG).exists():
        return
    own, configs = dict[str, Any](), _checkpoint_configs(folder)
    with suppress(OSError, ValueError):
        own = read_object(folder / CONFIG, "a model config")
    damaged = not own and (folder / _SESSIONS).is_file()  # each session writes the run's own again
    if weight_files(folder) or (configs and not damaged and not any(_agree(own, config) for config in configs)):
        raise ValueError(
            f"{folder} must hold one model; it is a training run, with its model in checkpoints/, and has a {CONFIG} "
            f"of another one. Move {CONFIG} and {WEIGHTS} to a folder for themselves, or name a checkpoint."
        )


def _checkpoint_configs(folder: Path) -> list[dict[str, Any]]:
    """Return the configs of a run's checkpoints, without those that are not as their manifests say."""
    configs = []
    for path in folder.glob(f"{_CHECKPOINTS}/{CONFIG}"):
        with suppress(OSError, ValueError, TypeError, LookupError):
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == _manifest_files(path.parent)[CONFIG]["sha256"]:
                configs.append(dict(parse_json(content)))
    return configs


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two configs may be of one model: the fields of both are equal. A later version writes more."""
    shared = one.keys() & other.keys()
    return bool(shared) and all(one[name] == other[name] for name in shared)


def _manifest_files(folder: Path) -> Mapping[str, Any]:
    """Return the files that a checkpoint's manifest lists; none if the folder is no checkpoint."""
    try:
        record = parse_json((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    files = record.get("files") if isinstance(record, dict) else None
    return files if isinstance(files, dict) else {}


def fill(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Fill a model of ``gecko.models`` on ``meta`` with copies of ``weights``, so that memory never holds two models.

    The tensors of ``load_tensors`` are memory-mapped: without the copy, a later write to the file would change them.
    """
    model.load_state_dict({name: weight.clone() for name, weight in weights.items()}, strict=True, assign=True)
    model.tie()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether the values are equal; those of ``one``, if it is on the meta device, are the other's."""
    return one.is_meta or one.data_ptr() == other.data_ptr() or torch.equal(one, other.to(one.device))


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose metadata contains a SHA-256 of all names, tensors and metadata. Raise OSError if
    writing fails; an existing file is unchanged."""
    with whole_file(Path(path)) as temporary:
        _write_tensors(temporary, tensors, metadata)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    ready = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    try:
        save_file(ready, path, metadata={**metadata, DIGEST: _digest(ready, metadata)})
        _sort_metadata(path)
    except SafetensorError as error:
        raise OSError(None, str(error)) from error


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a file: safetensors writes them in random order, and equal states must be equal files."""
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        fields = parse_json(header)
        fields["__metadata__"] = dict(sorted(fields["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode().ljust(len(header)))
        file.flush()
        os.fsync(file.fileno())  # a full disk may be noticed here


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file that ``save_tensors`` wrote. Raise FileNotFoundError if the file
    does not exist, ValueError if the file is of another kind, truncated or damaged."""
    path = Path(path)
    if not path.is_file():
        advice = "Name a file in it" if path.is_dir() else "Check the path"
        raise FileNotFoundError(f"{path} must be a file written by gecko; {found_at(path)}. {advice}.")
    with reading(path), safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    expected = metadata.pop(DIGEST, None)
    if expected is None:
        raise ValueError(f"{path} must have been written by gecko; it carries no {DIGEST} checksum.")
    if _digest(tensors, metadata) != expected:
        raise ValueError(f"{path} is damaged: its content does not match its {DIGEST} checksum. {REMEDY}")
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fitted(source: object, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file in the dtypes of ``like``, which has every name, shape and dtype that it must have.
    Errors are those of ``check_layout``; a value that is not finite is a ValueError."""
    check_layout(source, tensors, like)
    check_finite(source, tensors)
    return {name: tensors[name].to(expected.dtype) for name, expected in like.items()}


def check_layout(source: object, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor is missing, unknown, or of another shape or kind of dtype than in ``like``."""

    def alike(expected: Tensor, found: Tensor) -> bool:
        return found.dtype in FLOATS if expected.is_floating_point() else found.dtype == expected.dtype

    def described(tensor: Tensor | None) -> str:
        return "absent" if tensor is None else f"{str(tensor.dtype)[6:]} of shape {tuple(tensor.shape)}"

    for name in (*like, *tensors):
        expected, found = like.get(name), tensors.get(name)
        if expected is None or found is None or expected.shape != found.shape or not alike(expected, found):
            raise ValueError(
                f"{source} must hold the tensors of its config; {name} must be {described(expected)}, "
                f"and is {described(found)}. {REMEDY}"
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError, which names the file, in place of what safetensors raises for a damaged one."""
    try:
        yield
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a complete safetensors file; it is not: {error}. {REMEDY}") from error


def float_dtype(tensor: Tensor | None, default: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype of a tensor that files may store; ``default`` for another one, which ``fitted`` then refuses."""
    return tensor.dtype if tensor is not None and tensor.dtype in FLOATS else default


def check_finite(source: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor holds NaN or an infinity: nothing that is computed with it is a number."""
    for name, tensor in tensors.items():
        floating = tensor.is_floating_point() and tensor.numel() > 0
        if floating and not all(math.isfinite(x) for x in tensor.detach().aminmax()):
            raise ValueError(f"{source} must hold finite numbers; {name} has NaN or infinite ones. Use an older copy.")

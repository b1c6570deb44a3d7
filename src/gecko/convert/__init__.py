"""Convert models of other formats: checkpoints of the reference releases, Llamas of transformers and of GGUF files.

``from_reference`` and ``to_reference`` convert config and weights of a release; ``convert_model`` writes a folder.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from gecko.convert.gguf_file import SMOLLM2, read_gguf, read_smollm2
from gecko.convert.llama import LlamaSource, in_gecko, read_folder, write_card
from gecko.convert.release import from_reference, read_release, to_reference
from gecko.data.tokenizers import copy_tokenizer, holds_tokenizer
from gecko.io.files import read_object, whole_folder
from gecko.io.model_folder import CONFIG, fitted
from gecko.models import meta_model
from gecko.models.gecko import save_model

__all__ = ["convert_model", "from_reference", "read_release", "to_reference"]


def convert_model(source: str, out: Path, chunk_size: int | None = None, sinks: int | None = None) -> str:
    """Write the model folder ``out``, which appears whole or not at all; return what it holds, in words.

    Weights keep their values, in the widest dtype among them; float16 and quantised numbers become float32.

    Args:
        source: folder or weights file of a release, folder of transformers, GGUF file, or smollm2.
        chunk_size: that of the Gecko that a Llama becomes. None: 1,024.
        sinks: those of the Gecko that a Llama becomes. None: 1.

    Raises:
        FileNotFoundError: a file is missing.
        ImportError: a package that reads the file is not installed.
        ValueError: a file is damaged, or a Gecko block cannot compute the model.
    """
    path = Path(source).expanduser()
    llama: LlamaSource | None = None
    if source == SMOLLM2 and not path.exists():
        llama = read_smollm2()
    elif path.suffix == ".gguf":
        llama = read_gguf(path)
    elif (path / CONFIG).is_file() and "model_type" in read_object(path / CONFIG, "a model's config"):
        llama = read_folder(path)
    if llama is not None:
        config, weights = in_gecko(llama, 1024 if chunk_size is None else chunk_size, 1 if sinks is None else sinks)
        kind = f"{llama.name} in a Gecko block"
    elif (chunk_size, sinks) == (None, None):
        config, weights = from_reference(*read_release(path))
        later = "Gekko" if config.queries_and_keys == "separate" else "Gecko"
        kind = "Megalodon" if config.memory == "none" else later
    else:
        raise ValueError("--chunk and --sinks choose the window of a Llama; a release has its own chunk_size.")
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in weights.values()))
    weights = fitted(source, weights, meta_model(config).to(widest).state_dict())
    with whole_folder(out) as folder:
        save_model(folder, config, weights)
        if llama is not None:
            llama.write_tokenizer(folder)
            write_card(llama, config, folder)
        elif holds_tokenizer(beside := path.parent if path.is_file() else path):
            copy_tokenizer(str(beside), folder)
    count = sum(x.numel() for name, x in weights.items() if not (config.tie_embedding and "head" in name))
    return f"{kind}, {config.num_layers} layers, {count:,} parameters in {str(widest).removeprefix('torch.')}"

"""Export of a model with its code, for ``trust_remote_code=True`` without gecko installed, and a byte tokenizer.

An exported folder contains a copy of every module of this package that the model imports, one file each. Only the
imports change: ``from gecko.ops.cema import cema`` becomes ``from .gecko_ops_cema import cema``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gecko.hf.configuration import GeckoConfig
from gecko.hf.modeling import GeckoForCausalLM, GeckoModel
from gecko.io.files import whole_file
from gecko.models.gecko import Gecko
from gecko.runtime.process import __version__

BORDER, PADDING = "<|endoftext|>", "<|pad|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with the ids of ``gecko.data.ByteTokenizer``.

    Ids 0 to 255 are the bytes of UTF-8 text, 256 starts and ends a document, 257 pads on the left. Every text starts
    with 256, as documents do in training, unless ``add_special_tokens=False``. No text encodes to 256 or 257.
    """
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BORDER, PADDING])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BORDER} $A", pair=f"{BORDER} $A $B", special_tokens=[(BORDER, 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BORDER, eos_token=BORDER, pad_token=PADDING, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


CONFIGURATION, MODELING = GeckoConfig.__module__, GeckoForCausalLM.__module__
FILES = {CONFIGURATION: "configuration_gecko", MODELING: "modeling_gecko"}
"""File names of the two modules, as is usual on the hub."""

AUTO_MAP = {
    "AutoConfig": f"{FILES[CONFIGURATION]}.{GeckoConfig.__name__}",
    "AutoModel": f"{FILES[MODELING]}.{GeckoModel.__name__}",
    "AutoModelForCausalLM": f"{FILES[MODELING]}.{GeckoForCausalLM.__name__}",
}
"""``auto_map`` of an exported ``config.json``."""

_COPIED = """

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers 4 copies from a local folder only the files that this one names
"""

_IMPORT = re.compile(r"^(\s*)from (gecko[\w.]*) import ", re.MULTILINE)


def export(model: Gecko, folder: str | Path, tokenizer: Any = None) -> None:
    """Write ``model`` with its code, and with ``tokenizer`` if one is given.

    The folder opens with ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``, whether gecko is
    installed or not, and with ``gecko.load``. ``trust_remote_code=True`` runs the code in the folder.

    Args:
        tokenizer: tokenizer of transformers, such as ``byte_tokenizer()``; the config gets its special ids.

    Raises:
        ValueError: the tokenizer has ids beyond the model's vocabulary, or weights are quantised.
        FileExistsError: the folder is that of a training run, or of a checkpoint with weights.
        OSError: writing failed.
    """
    config = GeckoConfig.of(model.config, **_special_ids(tokenizer, model.config.vocab_size))
    config.auto_map = AUTO_MAP
    wrapped = GeckoForCausalLM(config)
    wrapped.model.gecko = model
    wrapped.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        _name_for_every_version(Path(folder) / "tokenizer_config.json")


def write_code(folder: Path) -> dict[str, str]:
    """Write every file of ``remote_code`` to ``folder``; return the ``auto_map`` for its config."""
    for name, source in remote_code().items():
        with whole_file(folder / f"{name}.py") as temporary:
            temporary.write_text(source, encoding="utf-8")
    return dict(AUTO_MAP)


def remote_code() -> dict[str, str]:
    """Return the source of each module that the model imports, with relative imports, by file name without .py."""
    configuration, modeling = _closure(CONFIGURATION), _closure(MODELING)
    code = {_file(module): _with_relative_imports(module, source) for module, source in modeling.items()}
    for module, needed in ((CONFIGURATION, configuration), (MODELING, modeling)):
        code[_file(module)] += _COPIED + "".join(
            f"    from .{_file(name)} import __name__  # noqa: F401\n" for name in sorted(needed) if name != module
        )
    return code


def _closure(module: str) -> dict[str, str]:
    """Return the sources of ``module`` and of the modules of this package that it imports, directly or not."""
    wanted, found = [module], {}
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _source(name)
            wanted += _imports(found[name])
    return found


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _imports(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [node.module for node in nodes if node.module and node.module.split(".")[0] == "gecko"]


def _with_relative_imports(module: str, source: str) -> str:
    code = _IMPORT.sub(lambda found: f"{found[1]}from .{_file(found[2])} import ", source)
    return f"# {module} of gecko-lm {__version__}, Apache-2.0, written by gecko.hf.export; only imports differ.\n{code}"


def _file(module: str) -> str:
    return FILES.get(module, module.replace(".", "_"))


def _special_ids(tokenizer: Any, vocab_size: int) -> dict[str, int]:
    if tokenizer is None:
        return {}
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the model's vocabulary must hold every id of the tokenizer; got vocab_size={vocab_size} and a "
            f"tokenizer with {len(tokenizer)} ids."
        )
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}


def _name_for_every_version(path: Path) -> None:
    """Replace a class name that only transformers 5 knows by the older one, which transformers 4 knows too."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

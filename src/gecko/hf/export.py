"""Export of a model with its code, for ``trust_remote_code=True`` without gecko installed.

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

from gecko.hf.classification import GeckoForSequenceClassification
from gecko.hf.configuration import GeckoConfig
from gecko.hf.modeling import GeckoForCausalLM, GeckoModel
from gecko.io.files import write_text
from gecko.models.gecko import Gecko
from gecko.runtime.process import __version__

FILES = {
    GeckoConfig.__module__: "configuration_gecko",
    GeckoForCausalLM.__module__: "modeling_gecko",
    GeckoForSequenceClassification.__module__: "classification_gecko",
}
"""File names of the modules that ``AUTO_MAP`` names, in the form that is usual on the hub."""

AUTO_MAP = {
    auto: f"{FILES[kind.__module__]}.{kind.__name__}"
    for auto, kind in {
        "AutoConfig": GeckoConfig,
        "AutoModel": GeckoModel,
        "AutoModelForCausalLM": GeckoForCausalLM,
        "AutoModelForSequenceClassification": GeckoForSequenceClassification,
    }.items()
}
"""``auto_map`` of an exported ``config.json``."""

_COPIED = """

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers 4 copies from a local folder only the files that this one names
"""

_IMPORT = re.compile(r"^(\s*)from (gecko[\w.]*) import ", re.MULTILINE)


def export(model: Gecko, folder: str | Path, tokenizer: Any = None) -> None:
    """Write ``model`` with its code and a model card, and with ``tokenizer`` if one is given.

    The folder opens with ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``, whether gecko is
    installed or not, and with ``gecko.load``. ``trust_remote_code=True`` runs the code in the folder, which holds no
    kernels. A model card that is in the folder is kept.

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
    _write_card(Path(folder), model)


_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- gecko
---

# {name}

A Gecko language model: {parameters:,} parameters in {layers} layers, {vocabulary:,} token ids. It reads texts of any
length; what it keeps of them has a constant size.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("def main(", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

`trust_remote_code=True` runs the Python files of this folder. They are copies of gecko-lm {version} without its C and
Triton kernels: they compute the same more slowly. With the kernels: `pip install 'gecko-lm[hf]'`, `import gecko.hf`,
and leave out `trust_remote_code`. Then `gecko generate`, `gecko eval` and `gecko serve` read the folder too.
"""


def _write_card(folder: Path, model: Gecko) -> None:
    if (folder / "README.md").exists():
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    text = _CARD.format(
        name=folder.resolve().name, parameters=count, layers=model.config.num_layers,
        vocabulary=model.config.vocab_size, version=__version__,
    )  # fmt: skip
    write_text(folder / "README.md", text)


def write_code(folder: Path) -> dict[str, str]:
    """Write every file of ``remote_code`` to ``folder``; return the ``auto_map`` for its config."""
    for name, source in remote_code().items():
        write_text(folder / f"{name}.py", source)
    return dict(AUTO_MAP)


def remote_code() -> dict[str, str]:
    """Return the source of each module that the model imports, with relative imports, by file name without .py."""
    sources = {module: _closure(module) for module in FILES}
    classifier = GeckoForSequenceClassification.__module__
    sources[GeckoForCausalLM.__module__][classifier] = _source(classifier)  # copied with the model when it is saved
    code = {_file(name): _with_relative_imports(name, text) for each in sources.values() for name, text in each.items()}
    for module, needed in sources.items():
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
            nodes = [node for node in ast.walk(ast.parse(found[name])) if isinstance(node, ast.ImportFrom)]
            wanted += [node.module for node in nodes if node.module and node.module.split(".")[0] == "gecko"]
    return found


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


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
        write_text(path, json.dumps(fields, indent=2) + "\n")

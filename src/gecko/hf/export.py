"""A folder that works with ``trust_remote_code=True`` where gecko is not installed.

It holds the modules that the model needs as they are in this package, one file each, in which only the imports
are changed: ``from gecko.ops.cema import cema`` becomes ``from .gecko_ops_cema import cema``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from gecko.files import whole_file
from gecko.hf.configuration import GeckoConfig
from gecko.hf.modeling import GeckoForCausalLM, GeckoModel
from gecko.model import Gecko
from gecko.version import __version__

CONFIGURATION, MODELING = GeckoConfig.__module__, GeckoForCausalLM.__module__
FILES = {CONFIGURATION: "configuration_gecko", MODELING: "modeling_gecko"}
"""Modules whose files are named as it is usual on the hub."""

_COPIED = """

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers 4 copies from a local folder only the files that this one names
"""

_IMPORT = re.compile(r"^(\s*)from (gecko[\w.]*) import ", re.MULTILINE)


def export(model: Gecko, folder: str | Path, tokenizer: Any = None) -> None:
    """Write ``model`` with its code, and with ``tokenizer`` if one is given.

    The folder opens with ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``, with gecko or
    without, and with ``gecko.load``. Someone who opens it runs the code in it, which anyone may read there.

    Args:
        tokenizer: of transformers, such as ``byte_tokenizer()``; its special ids go into the config.

    Raises:
        ValueError: the tokenizer has ids that the model does not know, or weights are quantised.
        OSError: the disk refused.
    """
    config = GeckoConfig.of(model.config, **_special_ids(tokenizer, model.config.vocab_size))
    config.auto_map = {
        "AutoConfig": f"{FILES[CONFIGURATION]}.{GeckoConfig.__name__}",
        "AutoModel": f"{FILES[MODELING]}.{GeckoModel.__name__}",
        "AutoModelForCausalLM": f"{FILES[MODELING]}.{GeckoForCausalLM.__name__}",
    }
    wrapped = GeckoForCausalLM(config)
    wrapped.model.gecko = model
    wrapped.save_pretrained(folder)
    for name, source in remote_code().items():
        with whole_file(Path(folder) / f"{name}.py") as temporary:
            temporary.write_text(source, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        _name_for_every_version(Path(folder) / "tokenizer_config.json")


def remote_code() -> dict[str, str]:
    """Every module that the model imports, by the name of its file: this package's source with other imports."""
    configuration, modeling = _closure(CONFIGURATION), _closure(MODELING)
    code = {_file(module): _with_relative_imports(module, source) for module, source in modeling.items()}
    for module, needed in ((CONFIGURATION, configuration), (MODELING, modeling)):
        code[_file(module)] += _COPIED + "".join(
            f"    from .{_file(name)} import __name__  # noqa: F401\n" for name in sorted(needed) if name != module
        )
    return code


def _closure(module: str) -> dict[str, str]:
    """The sources of ``module`` and of all that it imports from this package."""
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
    """transformers 5 writes a class name that 4 does not know; both know the older one."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

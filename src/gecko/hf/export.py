"""Export of a model with its code and tokenizer, for ``trust_remote_code=True`` without gecko installed.

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

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from gecko.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, byte_definition, byte_settings
from gecko.data.tokenizers import Tokenizer as ModelTokenizer
from gecko.hf.configuration import GeckoConfig
from gecko.hf.modeling import GeckoForCausalLM
from gecko.io.files import write_text
from gecko.models.gecko import Gecko
from gecko.runtime.process import __version__

FILES = {GeckoConfig.__module__: "configuration_gecko", GeckoForCausalLM.__module__: "modeling_gecko"}
"""File names of the modules that ``AUTO_MAP`` names, in the form that is usual on the hub."""
AUTO_MAP = {
    "AutoConfig": "configuration_gecko.GeckoConfig", "AutoModel": "modeling_gecko.GeckoModel",
    "AutoModelForCausalLM": "modeling_gecko.GeckoForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gecko.GeckoForSequenceClassification",
}  # fmt: skip
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
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            "the model's vocabulary must hold every id of the tokenizer; got "
            f"vocab_size={model.config.vocab_size} and a tokenizer with {len(tokenizer)} ids."
        )
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GeckoConfig.of(model.config, **special)
    config.auto_map = AUTO_MAP
    wrapped = GeckoForCausalLM(config)
    wrapped.model.gecko = model
    wrapped.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        path = Path(folder) / "tokenizer_config.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.get("tokenizer_class") == "TokenizersBackend":  # a name that transformers 4 does not know
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
            write_text(path, json.dumps(fields, indent=2) + "\n")
    card = Path(folder) / "README.md"
    if not card.exists():
        count = sum(parameter.numel() for parameter in model.parameters())
        sizes = {"parameters": count, "layers": model.config.num_layers, "vocabulary": model.config.vocab_size}
        write_text(card, _CARD.format(name=card.resolve().parent.name, version=__version__, **sizes))


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


def write_code(folder: Path) -> dict[str, str]:
    """Write every file of ``remote_code`` to ``folder``; return the ``auto_map`` for its config."""
    for name, source in remote_code().items():
        write_text(folder / f"{name}.py", source)
    return dict(AUTO_MAP)


def remote_code() -> dict[str, str]:
    """Return the source of each module that the model imports, with relative imports, by file name without .py."""
    sources = {module: _closure(module) for module in FILES}
    note = f"of gecko-lm {__version__}, Apache-2.0, written by gecko.hf.export; only imports differ."
    code = {}
    for name, text in (item for needed in sources.values() for item in needed.items()):
        relative = _IMPORT.sub(lambda found: f"{found[1]}from .{_file(found[2])} import ", text)
        code[_file(name)] = f"# {name} {note}\n{relative}"
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
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            found[name] = Path(spec.origin).read_text(encoding="utf-8")
            nodes = [node for node in ast.walk(ast.parse(found[name])) if isinstance(node, ast.ImportFrom)]
            wanted += [node.module for node in nodes if node.module and node.module.split(".")[0] == "gecko"]
    return found


def _file(module: str) -> str:
    return FILES.get(module, module.replace(".", "_"))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with the ids of ``gecko.ByteTokenizer``.

    Ids 0 to 255 are the bytes of UTF-8 text, 256 starts and ends a document, 257 pads on the left. Every text starts
    with 256, as documents do in training, unless ``add_special_tokens=False``. No text encodes to 256 or 257.
    """
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_definition()), **byte_settings(chat=False))


CHAT_TEMPLATE = """\
{%- set names = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"} -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in names or message.content is not string -%}
{{- raise_exception("a message must have text and the role system, developer, user or assistant.") -}}
{%- endif -%}
{%- set text = message.content | trim | replace("<|endoftext|>", "<|endoftext |>") | replace("<|pad|>", "<|pad |>") -%}
{{- names[message.role] + ":" -}}
{%- if message.role == "assistant" -%}
{%- generation -%}{{- " " + text + eos_token -}}{%- endgeneration -%}{{- "\\n\\n" -}}
{%- else -%}
{{- " " + text + "\\n\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant:" -}}{%- endif -%}
"""
"""The plain format of ``gecko serve``, with the document end after every answer. Answers are marked for training."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return ``byte_tokenizer()`` with a chat template, in the form that trainers of TRL expect.

    As in other tokenizers of transformers, and unlike in ``byte_tokenizer()``, the texts ``<|endoftext|>`` and
    ``<|pad|>`` encode to 256 and 257: TRL and chat templates write special tokens as text. The template changes these
    texts inside messages, so that a message cannot end itself.
    """
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def transformers_tokenizer(tokenizer: ModelTokenizer, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model in transformers' form: the same ids, after the one that starts a document.

    With a chat template, special tokens that a text contains become their ids, as chat templates write them as text.
    Raise ValueError if the tokenizer is a SentencePiece model.
    """
    if isinstance(tokenizer, ByteTokenizer):
        found = byte_tokenizer()
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        own = Tokenizer.from_str(tokenizer.definition)
        start, end = (own.id_to_token(index) for index in (tokenizer.document_start, tokenizer.document_end))
        own.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.document_start)]
        )
        padding = next((text for text in tokenizer.special_texts if "pad" in text.lower()), None)
        found = PreTrainedTokenizerFast(
            tokenizer_object=own, bos_token=start, eos_token=end, pad_token=padding, padding_side="left",
            split_special_tokens=True, clean_up_tokenization_spaces=False,
            model_input_names=["input_ids", "attention_mask"],
        )  # fmt: skip
    else:
        raise ValueError(
            f"transformers needs a tokenizer.json or the tokenizer of bytes; {tokenizer.name!r} is a SentencePiece "
            "model. Name a tokenizer.json with the same ids, or call gecko.hf.export(model, folder), which writes none."
        )
    if chat_template is not None:
        found.chat_template, found.split_special_tokens = chat_template, False
    return found

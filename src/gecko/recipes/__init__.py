"""Recipes: named functions that return a complete ``gecko.train.Run``, and ``key=value`` overrides of a run.

They are for pretraining, from a million parameters on two CPU cores to 7 B on 256 GPUs, and for comparisons.
``gecko train --list`` shows the first docstring line of each recipe.

**Pretraining.** Rows of 32K tokens need a rotary base of 500,000, as in Gecko-7B and Llama 2 Long (Xiong et al., 2023),
the paper's Llama with such a context. A Llama's attention needs all keys of a row, so ranks cannot share rows, and 128
rows occupy 128 GPUs. The Llama 2 of the paper's comparison has rows of 4K and a base of 10,000: on 256 GPUs set
``sequence_length=4096 batch_size=1024 model.rope_base=10000 parallel.replicate=32``.

**Comparison** of the paper at one million parameters on bytes: Gecko, its ablations, Megalodon and Llama 2. These
recipes differ in the model alone, and their numbers of parameters agree within 2 %. Set ``data.source``. In each, a
query attends to at most 128 tokens, itself included; only the Llama attends to its whole row. Gecko's sliding chunks
have 64 tokens, so a query sees 65 to 128. ``compare_chunk`` has chunks of 128, so a query sees 1 to 128. In
``compare_window`` the window is ``chunk_size``, so a query always sees 128. The memory takes the tokens that leave the
window, so its chunks have 128 tokens in these two. Recipes whose names end with ``_4m`` and ``_15m`` have four and
fifteen million parameters, and the learning rates that were best at a million, scaled for their width.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gecko.config import GeckoConfig
from gecko.io.files import read_object
from gecko.models import LlamaConfig, ModelConfig
from gecko.records import unknown_name
from gecko.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    Run,
    SampleSettings,
    ScheduleSettings,
    SkipSettings,
)
from gecko.train.run import NOT_SETTINGS, RECIPE
from gecko.train.settings import current_override, settings_help

__all__ = ["RECIPES", "apply_overrides", "get_recipe", "shown"]

_NO_SPIKES = SkipSettings(deviations=None)
"""No finite step is skipped: the paper reports none, and runs that are compared must train on the same steps."""


def tiny() -> Run:
    """The demo: about a million parameters that learn Python's standard library in minutes, on two CPU cores."""
    return Run(
        model=GeckoConfig.preset("tiny"), output="runs/tiny", batch_size=4, sequence_length=1024, minutes=6.0,
        precision="auto", optimizer=OptimizerSettings(learning_rate=8e-3), schedule=ScheduleSettings(warmup=0.03),
        evaluation=EvaluationSettings(every=100), checkpoint=CheckpointSettings(every=200),
        sample=SampleSettings(tokens=800),
    )  # fmt: skip


def books() -> Run:
    """Four million parameters on novels, as bytes: the model that is installed with the package. Set data.source."""
    sample = SampleSettings(prompt="It was ", tokens=600)
    of_four_million = COMPARISON["compare_gecko_4m"]()
    return replace(of_four_million, output="runs/books", steps=3663, precision="bfloat16", sample=sample)


def gecko_15m() -> Run:
    """15 M parameters on bytes: an overnight run on a desktop's CPU, minutes on a GPU."""
    return Run(
        model=GeckoConfig.preset("gecko-15m"), output="runs/gecko_15m", batch_size=16, sequence_length=4096,
        gradient_accumulation_steps=4, steps=5000, optimizer=OptimizerSettings(learning_rate=2e-3),
        schedule=ScheduleSettings(kind="cosine", warmup=0.02, final=0.1), evaluation=EvaluationSettings(every=250),
        checkpoint=CheckpointSettings(every=500), sample=SampleSettings(tokens=1000),
    )  # fmt: skip


def gecko_125m() -> Run:
    """125 M parameters on one GPU. Set data.source and data.tokenizer; the default corpus is far too small."""
    return Run(
        model=GeckoConfig.preset("gecko-125m"), output="runs/gecko_125m", batch_size=64, sequence_length=8192,
        gradient_accumulation_steps=16, steps=20_000, optimizer=OptimizerSettings(learning_rate=1e-3),
        schedule=ScheduleSettings(kind="cosine", warmup=0.05, final=0.1), precision="bfloat16",
        activation_checkpointing="full", evaluation=EvaluationSettings(every=500, final_rows=256),
        checkpoint=CheckpointSettings(every=1000, keep=3),
    )  # fmt: skip


def _of_the_paper(model: GeckoConfig, output: str, batch_size: int, steps: int, rise: int, rate: float) -> Run:
    """Return a run on rows of 32K tokens, which are 2 T tokens in all. The learning rate rises for ``rise`` steps."""
    return Run(
        model=model, output=output, batch_size=batch_size, sequence_length=32_768, steps=steps,
        optimizer=OptimizerSettings(learning_rate=rate), precision="bfloat16", skip=_NO_SPIKES,
        schedule=ScheduleSettings(kind="cosine", warmup=rise / steps, final=0.1), activation_checkpointing="full",
        compile=True, evaluation=EvaluationSettings(every=1000, rows=128, final_rows=1024),
    )  # fmt: skip


def gecko_1b() -> Run:
    """1.3 B parameters on Dolma, 2 T tokens, as in the paper: 64 GPUs. Set data.source to its token shards.

    The widths that the paper does not give are ours (``GeckoConfig.preset``), as are mesh and precision. A step has
    2,097,152 tokens, which is OLMo-1B's batch: its step 966,000 has seen 2,025 B tokens.
    """
    run = _of_the_paper(GeckoConfig.preset("gecko-1b"), "runs/gecko_1b", 64, steps=953_674, rise=2000, rate=4e-4)
    return replace(
        run,
        data=DataSettings(source="shards/dolma", tokenizer="allenai/OLMo-1B-0724-hf", validation_fraction=1e-5),
        optimizer=replace(run.optimizer, weight_decay=0.05),
        parallel=ParallelSettings(replicate=8, shard=8),
        checkpoint=CheckpointSettings(every=1000, keep=3, keep_every=50_000),
    )


def gecko_7b() -> Run:
    """7 B parameters, 2 T tokens, 32K context, as in the paper: 256 GPUs. Set data.source and data.tokenizer."""
    # Llama 2's tokenizer has its own licence: download the file from Meta.
    tokenizer = "tokenizers/llama2/tokenizer.model"
    return replace(
        _of_the_paper(GeckoConfig.preset("gecko-7b"), "runs/gecko_7b", 128, steps=476_837, rise=2500, rate=3.5e-4),
        data=DataSettings(source="shards/pretraining", tokenizer=tokenizer, validation_fraction=1e-5),
        # Data parallel 128 (32 × 4) × context 2; the 8 GPUs of a node share one copy of the parameters.
        parallel=ParallelSettings(replicate=32, shard=4, context=2),
        checkpoint=CheckpointSettings(every=500, keep=3, keep_every=25_000),
    )


def megalodon_7b() -> Run:
    """Megalodon-7B, the paper's baseline, trained as Gecko-7B is. Set data.source and data.tokenizer.

    The release's model with SwiGLU and chunks of 2,048. The paper's text has chunks of 4,096: model.chunk_size=4096.
    """
    return replace(gecko_7b(), model=GeckoConfig.preset("megalodon-7b"), output="runs/megalodon_7b")


def llama2_7b() -> Run:
    """Llama2-7B, the paper's baseline, on the rows that Gecko-7B is trained on. Set data.source and data.tokenizer."""
    model, parallel = LlamaConfig.preset("llama2-7b", rope_base=500_000.0), ParallelSettings(replicate=16, shard=8)
    return replace(gecko_7b(), model=model, output="runs/llama2_7b", parallel=parallel)


def _wider(model: ModelConfig, times: int, ffn_dim: int | None = None) -> ModelConfig:
    """Return a model ``times`` as wide. Layers, heads' dimension and groups' width stay.

    A Llama gets ``ffn_dim``, so that the models have the same number of parameters.
    """
    widths = {"model_dim", "key_dim", "value_dim", "ffn_dim", "num_heads", "timestep_groups"}
    sizes = {width: times * size for width, size in vars(model).items() if width in widths}
    return replace(model, **sizes if ffn_dim is None else sizes | {"ffn_dim": ffn_dim})


_TINY, _MEGALODON = GeckoConfig.preset("tiny"), GeckoConfig.preset("megalodon-tiny")
_LLAMA = LlamaConfig.preset("llama-tiny")
_SCALED = "with the learning rate of ``compare_gecko`` scaled for its width"
_TUNED = "with the learning rate found for a million"
_RATE = OptimizerSettings(learning_rate=8e-3)
_SCALED_RATE = OptimizerSettings(learning_rate=8e-3, base_width=128)
_LLAMA_RATE = OptimizerSettings(learning_rate=2e-3, base_width=128)
"""The learning rates were found for models of width 128."""
_COMPARED: dict[str, tuple[str, ModelConfig, OptimizerSettings]] = {
    "compare_gecko": (
        "Gecko of a million parameters on 10 M bytes, the reference of the comparison. Set data.source.", _TINY, _RATE,
    ),
    "compare_megalodon": (
        "Megalodon of the same size, with the gated feed-forward (SwiGLU) of the paper's Megalodon-7B and of Gecko.",
        _MEGALODON, _RATE,
    ),
    "compare_megalodon_ungated": (
        "Megalodon of the same size with the ungated feed-forward of its release's first 7B model.",
        GeckoConfig.preset("megalodon-tiny-ungated"), _RATE,
    ),
    "compare_llama": ("Llama 2 of the same size.", _LLAMA, _RATE),
    "compare_gekko": ("Gekko, the authors' later design, of the same size.", GeckoConfig.preset("gekko-tiny"), _RATE),
    "compare_paper": (
        "Gecko as the paper's text has it where the release differs: gate, length of queries and keys, input of CEMA.",
        replace(_TINY, gate="sum", unit_vectors="whole", cema_expansion=True), _RATE,
    ),
    "compare_chunk": ("Gecko that attends within a chunk.", replace(_TINY, attention="chunk", chunk_size=128), _RATE),
    "compare_window": (
        "Gecko that attends to a window of the same length for every token.",
        replace(_TINY, attention="sliding_window", chunk_size=128), _RATE,
    ),
    "compare_cumulative": (
        "Gecko with Megalodon's timestep norm: cumulative statistics of all tokens read.",
        replace(_TINY, timestep_betas=None), _RATE,
    ),
    "compare_no_memory": (
        "Gecko without working memory: only CEMA keeps information about tokens outside the window.",
        replace(_TINY, memory="none"), _RATE,
    ),
    "compare_longer_keys": (
        "Gecko with memory keys of initial length 11.31, twice the square root of the head dimension.",
        replace(_TINY, memory_key_length=11.31), _RATE,
    ),
    "compare_linear": (
        "Gecko with the memory of Infini-attention (linear, delta rule).", replace(_TINY, memory="linear"), _RATE,
    ),
    "compare_gecko_4m": (f"Gecko of four million parameters, {_SCALED}.", _wider(_TINY, 2), _SCALED_RATE),
    "compare_megalodon_4m": ("Megalodon of four million parameters.", _wider(_MEGALODON, 2), _SCALED_RATE),
    "compare_llama_4m": (f"Llama 2 of four million parameters, {_TUNED}.", _wider(_LLAMA, 2, 600), _LLAMA_RATE),
    "compare_gecko_15m": (f"Gecko of fifteen million parameters, {_SCALED}.", _wider(_TINY, 4), _SCALED_RATE),
    "compare_megalodon_15m": ("Megalodon of fifteen million parameters.", _wider(_MEGALODON, 4), _SCALED_RATE),
    "compare_llama_15m": (f"Llama 2 of fifteen million parameters, {_TUNED}.", _wider(_LLAMA, 4, 1184), _LLAMA_RATE),
}  # fmt: skip
"""What the list of recipes says, the model and the optimizer, by recipe."""


def _comparison(name: str, about: str, model: ModelConfig, optimizer: OptimizerSettings) -> Callable[[], Run]:
    """Return a recipe on 10 M bytes: 1,221 steps of 8,192."""

    def recipe() -> Run:
        return Run(
            model=model, output=f"runs/{name}", batch_size=4, sequence_length=2048, steps=1221, optimizer=optimizer,
            schedule=ScheduleSettings(kind="cosine", warmup=0.03), skip=_NO_SPIKES, threads=1,
            evaluation=EvaluationSettings(every=200, rows=64, final_rows=768),
            checkpoint=CheckpointSettings(every=200, keep=1), sample=SampleSettings(tokens=100),
        )  # fmt: skip

    recipe.__doc__ = about
    return recipe


COMPARISON: dict[str, Callable[[], Run]] = {name: _comparison(name, *row) for name, row in _COMPARED.items()}
_PRETRAINING = (tiny, books, gecko_15m, gecko_125m, gecko_1b, gecko_7b, megalodon_7b, llama2_7b)
RECIPES: dict[str, Callable[[], Run]] = {recipe.__name__: recipe for recipe in _PRETRAINING} | COMPARISON


def apply_overrides(run: Run, overrides: Sequence[str]) -> Run:
    """Return ``run`` with each ``key=value`` applied, for example ``optimizer.learning_rate=3e-3``.

    An unknown key, a value that does not fit the field, and minutes for a run whose steps are fixed raise ValueError.
    """
    overrides = [current_override(override) for override in overrides]
    changed = run.with_settings(*overrides)
    steps_given = any(override.startswith("steps=") for override in overrides)
    if changed.steps is None or steps_given or changed.minutes in (None, run.minutes):
        return changed
    raise ValueError(
        f"minutes are used only where steps is none, and steps are fixed at {changed.steps}; "
        f"got minutes={changed.minutes:g}. Set steps= for another length, or steps=none beside minutes= "
        "to measure how many fit into them."
    )


def shown(run: Run) -> Iterator[tuple[str, str]]:
    """Yield ``key=value`` with its value, and its meaning, for each setting that an override can change."""
    for name, value, meaning in settings_help(run):
        if name not in NOT_SETTINGS:
            yield f"{name}={value}", meaning


def get_recipe(name: str) -> Run:
    """Return the run of a recipe name, or the run in a ``recipe.json`` that an earlier run wrote."""
    if not name.endswith(".json"):
        known = name.replace("-", "_")
        if known in RECIPES:
            return replace(RECIPES[known](), recipe=known)
        unknown = f"{unknown_name('recipe', name, RECIPES)} `gecko train --list` describes all of them."
        raise ValueError((name.strip() and _is_no_recipe(name)) or unknown)
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{name} must be a recipe file that a run wrote; there is none. Recipes by name: {', '.join(RECIPES)}."
        )
    if "model" not in read_object(path, "a recipe"):
        raise ValueError(
            f"a recipe.json must be one that a run wrote, with the field 'model'; {path} is another file. A tokenizer "
            f"is named by data.tokenizer={path}, a text by data.source={path}."
        )
    run = Run.load(path)
    try:
        again = apply_overrides(get_recipe(run.recipe), run.overrides) if run.recipe in RECIPES else None
    except ValueError:
        again = None
    # If they no longer give the run, its file or the recipe was edited.
    return run if again == run else replace(run, recipe="", overrides=())


def _is_no_recipe(name: str) -> str | None:
    """Return the error message for the path of something else; None if ``name`` is no path."""
    path, rule = Path(name).expanduser(), "a recipe must be a name or a recipe.json;"
    train_on_it = f"To train on it: gecko train tiny data.source={shlex.quote(name)} --out runs/mine"
    if (path / RECIPE).is_file():
        return (
            f"{rule} {name} is a run or checkpoint. To train it further: gecko train {path / RECIPE} --resume; to "
            f"start a new run from its weights, add init_from={name} to a recipe."
        )
    if path.is_dir():
        return f"{rule} {name} is a folder. {train_on_it}"
    if path.is_file():
        chats = f". To tune a model on chats in it: gecko finetune MODEL {name} --out runs/chat"
        return f"{rule} {name} is another file. {train_on_it}{chats if path.suffix == '.jsonl' else ''}"
    if path.suffix:
        return f"{rule} there is no {name}. To start a run: gecko train tiny data.source=TEXT --out runs/mine"
    if path.parent != Path():
        return f"{rule} there is no {name}. To start a run: gecko train tiny --out {shlex.quote(name)}"
    return None

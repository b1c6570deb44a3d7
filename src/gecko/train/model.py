"""The model that a run trains: new or from another one, sharded, with adapters, in float8, compiled.

**float8**: linear layers with products in float8, by torchao's training path. Each row of the inputs, of a weight and
of the gradients is divided by a power of two and rounded to float8 (e4m3), for all three products of a layer. Weights,
the optimizer's state and checkpoints stay float32.

**Adapters**: low-rank adapters (LoRA) of PEFT on the linear layers of the blocks; the other parameters are frozen. A
checkpoint holds the merged model, which every command reads, and the adapters, from which training resumes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gecko.data import ByteTokenizer, load_tokenizer
from gecko.data.tokenizers import known_tokenizer
from gecko.io.checkpoints import model_folder
from gecko.io.fingerprints import fingerprint
from gecko.io.model_folder import reading, stored_prefix
from gecko.io.quantization import is_quantized
from gecko.models import LanguageModel, build_model, load_any, meta_model
from gecko.models.gecko import Block
from gecko.parallel.mesh import Ranks
from gecko.parallel.sharding import empty_sharded_model, fill
from gecko.runtime.process import require, without_log_warnings
from gecko.train.optimizer import named_parameters
from gecko.train.run import Precision, Run, is_half


def starting_model(run: Run, ranks: Ranks, device: torch.device, *, fresh: bool) -> LanguageModel:
    """Return a new model or that of ``run.init_from``. Without ``fresh``, its weights are still to be loaded.

    With several ranks, only the first builds the whole model, on the CPU; each rank receives its shards.
    """
    if ranks.world == 1:
        # Adapters do not contain the weights that they change.
        model = (_initial(run) if fresh or run.lora_rank is not None else build_model(run.model)).to(device)
        if run.lora_rank is not None:
            add_adapters(model, run.lora_rank)
        return configured(model, run)
    if run.lora_rank is not None:
        raise ValueError(f"lora_rank trains adapters in one process; got {ranks.world}. Set lora_rank=none.")
    template = configured(meta_model(run.model), run)
    model = empty_sharded_model(template, ranks.sharding_mesh, device, bfloat16=is_half(run.precision))
    if fresh:
        weights = ranks.run_or_abort_all(lambda: dict(_initial(run).named_parameters()) if ranks.is_main else None)
        fill(model, weights)
    return model


def configured(model: LanguageModel, run: Run) -> LanguageModel:
    """Return ``model`` with the run's settings; its blocks are compiled if the run says so."""
    model.activation_checkpointing, model.z_loss = run.activation_checkpointing, run.z_loss
    use_float8(model, run.precision)
    if run.compile:
        for block in model.blocks:
            compile_block(block)
    return model


def compile_block(block: nn.Module, **settings: Any) -> None:
    """Compile a block by ``torch.compile`` with ``settings``, except the operators that mix tokens.

    The layout of these depends on the documents of each batch and is computed on the host. The rest has fixed shapes,
    so it is compiled once and recomputed by the same code. On a context rank the whole mixer is excepted.
    """
    if isinstance(block, Block):  # a Llama's attention is never compiled
        mixer: Any = block.mixer
        for module in filter(None, (mixer.norm, mixer.cema)):
            module.forward = torch.compiler.disable(module.forward)
        mixer.mix = torch.compiler.disable(mixer.mix)
        alone, on_rank = mixer.forward, torch.compiler.disable(mixer.forward)
        mixer.forward = lambda x, state, segments: (on_rank if segments.exchange else alone)(x, state, segments)
    block.compile(dynamic=False, **settings)


def _initial(run: Run) -> LanguageModel:
    if run.init_from is None:
        return build_model(run.model)
    folder = model_folder(run.init_from)
    model = load_any(folder)
    found = model.config.to_dict()
    if different := [name for name, value in run.model.to_dict().items() if found.get(name, ...) != value]:
        raise ValueError(
            f"init_from must hold a model of this run's architecture; {folder} differs in {', '.join(different)}. "
            "Set model.* to what its config.json says."
        )
    if any(map(is_quantized, model.state_dict().values())):
        raise ValueError(f"init_from must hold a model that is not quantised; {folder} is. Use the one it was made of.")
    check_same_tokenizer(folder, run.data.tokenizer)
    return model.float().train()


_PROBE = "The quick brown fox: 3.14 × 2 = 6,28…\n\tif x != 0:  return '/home'\nÀ là niña, Straße, Привет, 你好, 🙂"


def check_same_tokenizer(folder: Path, given: str) -> None:
    """Raise ValueError if the tokenizer ``given`` and that of the model in ``folder``, if it is known, make different
    ids of the same text. Warn if the model's cannot be loaded and may be the same."""
    known = known_tokenizer(folder)
    if known is None or known == given:
        return

    def ids(name: str) -> list[int]:
        # Of a varied text. Files cannot be compared: libraries save the same tokenizer with different bytes.
        tokenizer = load_tokenizer(name)
        return [tokenizer.document_start, *tokenizer.encode(_PROBE).tolist(), tokenizer.document_end]

    try:
        same = ids(known) == ids(given)
    except (FileNotFoundError, ValueError, ImportError) as error:
        # A file or a library is missing. The bytes tokenizer needs neither: if it is ``given``, ``known`` is another.
        same = given != ByteTokenizer.name
        if same:
            warnings.warn(f"data.tokenizer could not be compared with that of init_from: {error}", stacklevel=2)
    if not same:
        raise ValueError(
            f"data.tokenizer must be that of the model in init_from, for which other ids mean other text; {folder} was "
            f"trained with {known!r}, got {given!r}. Set data.tokenizer={known}"
        )


def check_float8(precision: Precision, device: torch.device) -> None:
    """Raise ValueError if ``precision`` is ``float8`` and the device has no float8 products, and ImportError if torchao
    is not installed."""
    if precision.startswith("float8"):
        _torchao()
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if precision == "float8" and (found is None or found < (8, 9)):
        what = str(device) if found is None else f"{device} with {found[0]}.{found[1]}"
        raise ValueError(
            f"precision=float8 needs a GPU of compute capability 8.9 or newer, as an H100; got {what}. Try "
            "precision=bfloat16, or precision=float8_emulated, which rounds alike and is slow."
        )


def use_float8(model: LanguageModel, precision: Precision) -> None:
    """Replace the linear layers of blocks in place, whose sizes are multiples of 16, by layers that multiply in float8.

    The names of parameters and the parameters themselves do not change. Embedding, head and norms stay as they are.
    """
    if not precision.startswith("float8"):
        return
    library = _torchao()
    settings = library.Float8LinearConfig.from_recipe_name("rowwise")
    settings = replace(settings, emulate=precision == "float8_emulated")

    def has_float8_sizes(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)

    for block in model.blocks:
        library.convert_to_float8_training(block, config=settings, module_filter_fn=has_float8_sizes)


@contextmanager
def without_float8(model: LanguageModel, precision: Precision) -> Iterator[None]:
    """Context that undoes ``use_float8``: torchao's layers do not run under ``torch.inference_mode``."""
    kind: Any = _torchao().float8_linear.Float8Linear if precision.startswith("float8") else None
    changed = [] if kind is None else [module for module in model.modules() if type(module) is kind]
    try:
        for module in changed:
            module.__class__ = nn.Linear
        yield
    finally:
        for module in changed:
            module.__class__ = kind


def _torchao() -> Any:
    with without_log_warnings():
        return require("torchao.float8", "quantize")


ADAPTERS, _BASE = "adapters.safetensors", "base"
"""File of a checkpoint, and name of the starting model's fingerprint in its metadata."""


def add_adapters(model: LanguageModel, rank: int) -> None:
    """Give every linear layer of the blocks an adapter, zero at first, and freeze all other parameters. The output of
    adapters is scaled by 2, so that the rate need not change with the rank. ImportError: PEFT is not installed."""
    with without_log_warnings():
        peft = require("peft", "finetune")
    base = fingerprint(model)
    blocks = {module for block in model.blocks for module in block.modules()}
    layers = [name for name, module in model.named_modules() if module in blocks and isinstance(module, nn.Linear)]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, model)
    model.adapters_of = base  # type: ignore[assignment, unused-ignore]


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "adapters_of")


def merged(model: LanguageModel) -> LanguageModel:
    """Return a plain model whose weights are those of ``model`` with the adapters added; its tensors are not copied."""
    from peft.tuners.lora import LoraLayer

    weights: dict[str, Tensor] = {}
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, module in adapted.items():
        layer = module.get_base_layer()
        weights[f"{name}.weight"] = layer.weight.detach() + module.get_delta_weight("default").detach()
        if layer.bias is not None:
            weights[f"{name}.bias"] = layer.bias.detach()
    inside = tuple(f"{name}." for name in adapted)
    others = {name: weight for name, weight in model.state_dict().items() if not name.startswith(inside)}
    plain = meta_model(model.config)
    plain.load_state_dict({**others, **weights}, assign=True)
    return plain


def save_adapters(model: LanguageModel, folder: Path) -> None:
    """Write the adapters beside the merged model of a checkpoint, under names like those of its weights."""
    prefix = stored_prefix(folder)
    tensors = {prefix + name: parameter.detach().contiguous() for name, parameter in named_parameters(model)}
    save_file(tensors, folder / ADAPTERS, metadata={_BASE: str(model.adapters_of)})


def check_base(model: LanguageModel, folder: Path) -> None:
    """Raise ValueError if the adapters in a checkpoint were trained on other weights than those of ``model``."""
    with reading(folder / ADAPTERS), safe_open(folder / ADAPTERS, framework="pt") as file:
        base = (file.metadata() or {}).get(_BASE)
    if base != str(model.adapters_of):
        raise ValueError(
            f"init_from must hold the weights that the adapters in {folder} were trained on, {base}; it holds "
            f"{model.adapters_of}. Put back the model that the run started from."
        )

"""Base class of the models for transformers: loading and saving of folders, and initialisation."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from gecko.hf.configuration import GeckoConfig
from gecko.io.checkpoints import CHECKPOINTS, model_folder, shipped_folder
from gecko.io.files import write_text
from gecko.io.fingerprints import stored_weight
from gecko.io.model_folder import CONFIG, FORMAT, TIED, Layout, check_finite, check_shards, write_folder
from gecko.io.quantization import is_quantized
from gecko.models.gecko import Gecko
from gecko.runtime.tensors import meta_device

_PARTS = ("embedding.", "blocks.", "final_norm.", "head.")
"""Prefixes of the parameter names in a ``Gecko``."""
_HAS_VALUES = "_is_hf_initialized"
"""Attribute by which transformers marks parameters that were loaded or drawn."""
SCORE = "score.weight"
"""Parameter of a classifier that a ``Gecko`` does not have."""


def _mark_values(module: nn.Module) -> None:
    """Mark the parameters of a module that replaces another: ``initialize_weights`` must not draw them again."""
    for parameter in module.parameters():
        setattr(parameter, _HAS_VALUES, True)


class GeckoPreTrainedModel(PreTrainedModel):
    """Base class: loading, saving, gradient checkpointing."""

    config_class = GeckoConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    """transformers may ask for "eager" or "sdpa": a Gecko has one attention, which serves both names."""
    _is_stateful = True
    _no_split_modules = ["GeckoBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _to_gecko: str
    """Prefix of the ``Gecko``'s parameter names in this model."""
    _format = FORMAT
    """Format of the weights file, which ``gecko.load`` checks."""
    _may_differ: Collection[str] = ()
    """Parameters that a folder may lack or have in addition."""

    @property
    def _gecko(self) -> Gecko:
        found: Any = self.get_submodule(self._to_gecko.removesuffix("."))
        return found

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the weights that have no values yet, those of a ``Gecko`` as its constructor does."""

        def has_values(name: str, parameter: nn.Parameter) -> bool:
            # transformers 4 marks a parameter, replaces it by the loaded one, and keeps the mark of the module only.
            marked = parameter, self._gecko.get_submodule(name.rpartition(".")[0])
            return any(getattr(x, _HAS_VALUES, False) for x in marked)

        weights = dict(self._gecko.named_parameters(remove_duplicate=False))
        without = [name for name, x in weights.items() if not x.is_meta and not has_values(name, x)]
        super().initialize_weights()  # which marks all modules
        drawn = type(self._gecko)(self._gecko.config).state_dict() if without else {}
        for name in without:
            weights[name].copy_(drawn[name])
            setattr(weights[name], _HAS_VALUES, True)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the scores of a classifier; ``initialize_weights`` draws the weights of a Gecko."""
        if module is getattr(self, SCORE.partition(".")[0], None):
            nn.init.normal_(module.weight, std=1 / math.sqrt(self.config.hidden_size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load parameters whose names have this model's prefix, or are those of a ``Gecko``. ``Trainer`` resumes with
        ``strict=False``, so report an error if a ``Gecko``'s parameter is not in this model, or if no name is known."""
        parts, own = tuple(prefix + part for part in _PARTS), prefix + self._to_gecko
        renamed = {name: own + name.removeprefix(prefix) for name in state_dict if name.startswith(parts)}
        for name, new in renamed.items():
            state_dict[new] = state_dict.pop(name)
        if self._gecko.config.tie_embedding:
            head, embedding = (own + name for name in TIED)
            if embedding in state_dict:
                state_dict.setdefault(head, state_dict[embedding])
        known = self.state_dict(prefix=prefix)
        wrong = [name for name in renamed.values() if name not in known]
        if wrong or (state_dict and not any(name.startswith(own) for name in state_dict)):
            errors: list[str] = args[-1]
            errors.append(
                f"weights must be those of this model, named {self._to_gecko}… or as in a Gecko; got "
                f"{sorted(wrong or state_dict)[:3]}. Folders of quantised models open with gecko.load."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_input_embeddings(self) -> nn.Module:
        return self._gecko.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        _mark_values(value)
        self._gecko.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self._gecko.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        _mark_values(new_embeddings)
        self._gecko.head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize the embedding and the head, and set the architecture's ``vocab_size``."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self._gecko.config = self.config.architecture()
        return embedding

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model; unlike transformers, refuse a folder that lacks parameters instead of drawing random ones.

        The folder of a training run stands for its newest undamaged checkpoint, and ``books`` for the shipped model.
        Random parameters, which transformers logs, are accepted in a classifier's scores; where
        ``ignore_mismatched_sizes`` is set and shapes differ; with None for the folder, as ``state_dict`` then holds the
        weights; and with ``output_loading_info``, which names them.

        Raises:
            ValueError: parameters are missing, unexpected, of another shape, or of several models.
        """
        named = args[0] if args else None
        if named is not None and (Path(named, CHECKPOINTS).is_dir() or shipped_folder(named) is not None):
            args = (str(model_folder(named)), *args[1:])
        parts = "|".join(part.removesuffix(".") for part in _PARTS)
        kwargs.setdefault("key_mapping", {rf"^({parts})\.": r"gecko.\1."})
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        check_shards(Path(model.name_or_path, kwargs.get("subfolder", "")))
        check_finite(model.name_or_path, {name: x for name, x in model.named_parameters() if not x.is_meta})
        if output_loading_info:
            return model, info
        if args and args[0] is None:
            return model
        reshapes = kwargs.get("ignore_mismatched_sizes")  # draws what has another shape in the folder
        for problem in ("missing_keys", "unexpected_keys", *(() if reshapes else ("mismatched_keys",))):
            found = sorted(name if isinstance(name, str) else name[0] for name in info[problem])
            if names := [name for name in found if name not in cls._may_differ]:
                raise ValueError(
                    f"{model.name_or_path} must hold the parameters of its config; {problem.replace('_', ' ')}: "
                    f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}. Quantised folders open with gecko.load."
                )
        return model

    def save_pretrained(  # type: ignore[override]
        self, save_directory: Any, is_main_process: bool = True, state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False, max_shard_size: int | str | None = None, safe_serialization: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Write a folder that ``gecko.load`` and ``from_pretrained`` read; every weights file has a checksum.

        The weights are one file, or with ``max_shard_size`` (bytes, or a text such as "5GB") files of at most that
        size. With adapters of ``add_adapter``, only the adapters are written.

        Raises:
            ValueError: ``push_to_hub``, a format other than safetensors, or weights that are quantised, missing, of
                another model, or differ where the config ties them.
            OSError: writing failed; existing files are unchanged.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
            return
        if push_to_hub or not safe_serialization or kwargs.get("variant"):
            raise ValueError("a Gecko is saved as safetensors files; to upload it, use model.push_to_hub(name).")
        if not is_main_process:
            return
        folder, weights = Path(save_directory), self.state_dict() if state_dict is None else state_dict
        self._check_weights(weights)
        weights = {name: stored_weight(self, name) if x.is_meta else x for name, x in weights.items()}
        config: Any = copy.deepcopy(self.config)
        config.architectures = [type(self).__name__]
        config.dtype = str(self.dtype).removeprefix("torch.")
        head, embedding = (self._to_gecko + name for name in TIED)
        layout = Layout(self._format, (head, embedding))
        kept = {name: x for name, x in weights.items() if not (name == head and self.config.tie_embedding)}
        shards: list[list[str]] = []
        if max_shard_size is not None:
            split = split_torch_state_dict_into_shards(kept, max_shard_size=max_shard_size).filename_to_tensors
            shards = [list(names) for _, names in sorted(split.items())] if len(split) > 1 else []
        write_folder(folder, config.architecture(), weights, layout, shards=shards)
        if self._auto_class is not None:  # this class comes from remote code: copy that code
            custom_object_save(self, folder, config=config)
        elif config.auto_map:  # this class is the package's, loaded from an export
            config.auto_map = importlib.import_module("gecko.hf.export").write_code(folder)
        write_text(folder / CONFIG, config.to_json_string())
        if self.can_generate():
            self.generation_config.save_pretrained(folder)

    def _check_weights(self, weights: dict[str, Tensor]) -> None:
        with meta_device():
            parts = Gecko(self.config.architecture()).state_dict()
        expected = {self._to_gecko + name for name in parts}
        expected |= {name for name in self.state_dict() if not name.startswith(self._to_gecko)}
        wrong = expected.symmetric_difference(weights)
        if wrong - ({self._to_gecko + TIED[0]} if self.config.tie_embedding else set()):
            raise ValueError(
                f"state_dict must hold parameters {self._to_gecko}…, all of them and no others; missing or unknown: "
                f"{', '.join(sorted(wrong)[:3])}. Merge adapters before saving."
            )
        quantized = next((name for name, weight in weights.items() if is_quantized(weight)), None)
        if quantized is not None:
            raise ValueError(
                f"weights in a folder for transformers must not be quantised; {quantized} is. Write the model before "
                "quantisation, or write this one with Gecko.save for gecko.load."
            )

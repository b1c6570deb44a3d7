"""ONNX graph of one decoding step: a token, a position and a state in; logits and the next state out."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gecko.io.files import whole_file
from gecko.io.quantization import is_quantized
from gecko.models.gecko import Gecko, sharing_parameters
from gecko.runtime.process import require
from gecko.runtime.tensors import map_tensors
from gecko.segments import Clock
from gecko.state import GeckoState

CLOCK = "clock."
MOST_BYTES = 1536 << 20
"""Most bytes of weights: PyTorch writes larger ones to a second file, which a renamed graph would not find."""
TOKEN, POSITION, LOGITS, NEXT = "token", "position", "logits", "next."
GRAPH, START = "step.onnx", "initial_state.safetensors"


def initial_state(model: Gecko) -> dict[str, Tensor]:
    """Return the tensors (1, …) of the state before the first token, by the names of the graph's inputs.

    They are float32, also those of a window in bfloat16, which many runtimes cannot compute.
    """
    state = GeckoState.empty(replace(model.config, bfloat16_window=False))
    return {name: x.clone() for name, x in state.tensors().items() if not name.startswith(CLOCK)}


def export_onnx(model: Gecko, path: str | Path) -> None:
    """Write the graph of ``Gecko.step`` for one row that reads one document, with the weights, to an ONNX file.

    Inputs: ``token`` and ``position`` (number of tokens read before), (1,) int64 each, and the tensors of the state by
    their names in ``initial_state``. Outputs: ``logits`` (1, V), and the tensors of the next state, as ``next.NAME``.
    Raise ImportError if the extra ``onnx`` is not installed, ValueError if the weights are not plain float32 or take
    more than ``MOST_BYTES``, OSError if writing failed; an existing file is unchanged.
    """
    require("onnxscript", "onnx")
    if any(type(x) is not nn.Parameter or x.dtype != torch.float32 for x in model.parameters()):
        raise ValueError("an ONNX graph needs plain float32 weights; load the model before quantisation, as float32.")
    size = sum(x.nbytes for x in model.parameters())
    if size > MOST_BYTES:
        raise ValueError(f"the weights of an ONNX graph must take at most {MOST_BYTES:,} bytes; they take {size:,}.")
    state, start = initial_state(model), torch.zeros(1, dtype=torch.int64, device="cpu")
    step = _DecodingStep(sharing_parameters(model, bfloat16_window=False)).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(step, (start, start.clone(), list(state.values())))
        names = [TOKEN, POSITION, *state], [LOGITS, *(NEXT + name for name in state)]
        graph = torch.onnx.export(program, input_names=names[0], output_names=names[1], dynamo=True, verbose=False)
    assert graph is not None
    with whole_file(Path(path)) as temporary:
        graph.save(temporary)


def save_onnx(model: Gecko, folder: str | Path) -> None:
    """Write the graph of ``export_onnx`` and the tensors of ``initial_state`` to a folder, for programs without Python.

    The weights are widened to float32 in place, which changes no value. Errors are those of ``export_onnx``.
    """
    if not any(is_quantized(x) or x.dtype == torch.float64 for x in model.parameters()):
        model.float()
    export_onnx(model, Path(folder) / GRAPH)
    with whole_file(Path(folder) / START) as temporary:
        save_file(initial_state(model), temporary)


class _DecodingStep(nn.Module):
    """One step as a function of tensors."""

    def __init__(self, model: Gecko) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, position: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        parts, zeros = iter(tensors), torch.zeros_like(position)
        blank = GeckoState.empty(self.model.config)
        state = replace(
            blank, clock=Clock(position, zeros, zeros),
            mixers=tuple(mixer.map(lambda _: next(parts)) for mixer in blank.mixers),
            final_norm=map_tensors(blank.final_norm, lambda _: next(parts)),
        )  # fmt: skip
        logits, after = self.model.unchecked_step(token, state)
        return logits, [x for name, x in after.tensors().items() if not name.startswith(CLOCK)]

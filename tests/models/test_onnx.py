"""Decoding with ONNX Runtime gives the logits of the model."""

from __future__ import annotations

import pytest
import torch
from support import cases

import gecko
from gecko.config import PRESETS
from gecko.io.quantization import quantize
from gecko.models.onnx import LOGITS, NEXT, POSITION, TOKEN, export_onnx, initial_state, save_onnx

pytest.importorskip("onnxscript", reason="pip install 'gecko-lm[onnx]'")
runtime = pytest.importorskip("onnxruntime")

ARCHITECTURES = {
    "gecko": {},
    "linear memory, tied": {"memory": "linear", "tie_embedding": True, "attention": "chunk"},
    "Megalodon": {"memory": "none", "attention": "sliding_window", "timestep_betas": None, "cema_skip": "learned"},
    "Llama": {**cases.LLAMA, "num_heads": 4, "key_value_heads": 2, "sinks": 2, "bfloat16_window": True},
    "Gekko, orthogonal": {**PRESETS["gekko-tiny"].to_dict(), "chunk_size": 8, "num_layers": 1, "memory": "orthogonal"},
}


def built(**changes: object) -> gecko.Gecko:
    torch.manual_seed(0)
    config = gecko.GeckoConfig.preset("tiny", **{"num_layers": 1, "chunk_size": 8, **changes})
    model = gecko.Gecko(config).requires_grad_(False)
    for parameter in model.parameters():  # many are 0 at first
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_logits_over_several_chunks(changes, tmp_path):
    model = built(**changes)
    export_onnx(model, tmp_path / "step.onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1  # threads that wait for work would occupy the processor
    session = runtime.InferenceSession(str(tmp_path / "step.onnx"), options, providers=["CPUExecutionProvider"])
    assert {x.name for x in session.get_inputs()} <= {TOKEN, POSITION, *initial_state(model)}
    tokens = torch.randint(0, 256, (40,))
    exact = built(**{**changes, "bfloat16_window": False})
    expected = exact(tokens.unsqueeze(0))[0][0]
    state = {name: x.numpy() for name, x in initial_state(model).items()}
    given, outputs = [x.name for x in session.get_inputs()], [x.name for x in session.get_outputs()]
    for position in range(len(tokens)):
        at = {TOKEN: tokens[position : position + 1].numpy(), POSITION: torch.tensor([position]).numpy()}
        values = {**at, **state}
        found = dict(zip(outputs, session.run(None, {name: values[name] for name in given}), strict=True))
        torch.testing.assert_close(torch.from_numpy(found[LOGITS][0]), expected[position], rtol=1e-4, atol=1e-5)
        state = {name: found[NEXT + name] for name in state}


def test_quantised_weights_are_refused(tmp_path):
    pytest.importorskip("torchao")
    model = built()
    quantize(model, 8)
    with pytest.raises(ValueError, match="before quantisation"):
        export_onnx(model, tmp_path / "step.onnx")


def test_wider_weights_are_refused_and_stay_as_they_are(tmp_path):
    model = built().double()
    with pytest.raises(ValueError, match="needs plain float32 weights"):
        save_onnx(model, tmp_path)
    assert model.head.weight.dtype == torch.float64 and not list(tmp_path.iterdir())

"""An exported folder with its code works without gecko installed."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import cases
from transformers import AutoModelForCausalLM, AutoTokenizer

import gecko
from gecko.hf import GeckoConfig, GeckoForCausalLM, byte_tokenizer, export
from gecko.hf.export import remote_code
from gecko.io.quantization import quantize

PROGRAM = """
import json, sys, torch

class NoGecko:
    asked = False

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gecko":
            NoGecko.asked = True
            raise ModuleNotFoundError("gecko is not installed here", name=name)

folder, again, *others = sys.argv[1:]
sys.meta_path.insert(0, NoGecko())
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["def f", "a longer prompt " * 40], padding=True, return_tensors="pt")
made = []
for source in (folder, again, *others):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None)
    made.append(out[:, inputs["input_ids"].shape[1]:].tolist())
    model.save_pretrained(again)
model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
norm = float(sum(weight.grad.square().sum() for weight in model.parameters()))
print(json.dumps([made, norm, type(model).__module__, NoGecko.asked]))
"""
PROMPTS = ["def f", "a longer prompt " * 40]
"""The second prompt fills several chunks."""


def run(home: Path, *arguments: str) -> list[Any]:
    """Run ``PROGRAM`` in a separate process, in a folder of its own; return what it prints."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(home / "modules"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment, cwd=home, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "holds no C or Triton kernels" in ran.stderr
    found: list[Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def model() -> gecko.Gecko:
    torch.manual_seed(2)
    return gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))


def test_code_runs_without_gecko_and_does_not_ask_for_it(model, tmp_path):
    """So it is the same where gecko is installed. What the package saves of an export is read too."""
    export(model, tmp_path / "model", byte_tokenizer())
    saved = ["saved", "trusted"]
    for name in saved:
        save(tmp_path / "model", tmp_path / name, trust=name == "trusted")
    generated, norm, module, asked = run(tmp_path, "model", "again", *saved)
    prompts = byte_tokenizer()(PROMPTS).input_ids
    assert len(prompts[1]) > 3 * model.config.chunk_size
    expected = gecko.generate(model, prompts, max_new_tokens=4, temperature=0).tokens
    assert generated == [expected] * (2 + len(saved))
    assert norm == pytest.approx(gradient(model), rel=1e-3)
    assert module.startswith("transformers_modules.") and not asked
    for folder in ("model", "again", *saved):
        assert gecko.load(tmp_path / folder).fingerprint() == model.fingerprint()


def save(export: Path, folder: Path, *, trust: bool) -> None:
    """Let the package open an export and save it; its code must stay what it is."""
    opened = AutoModelForCausalLM.from_pretrained(export, **({"trust_remote_code": True} if trust else {}))
    # transformers 4 prefers the folder's code to the registered class if trust_remote_code is set.
    remote = transformers.__version__ < "5" and trust
    assert isinstance(opened, GeckoForCausalLM) is not remote
    opened.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    python = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert python == {path.name: path.read_bytes() for path in export.glob("*.py")}


def gradient(model: gecko.Gecko) -> float:
    theirs = wrapped(copy.deepcopy(model)).train()
    inputs = byte_tokenizer()(PROMPTS, padding=True, return_tensors="pt")
    theirs(**inputs, labels=inputs["input_ids"]).loss.backward()
    return float(sum(weight.grad.square().sum() for weight in theirs.parameters()))


def test_code_is_this_package_s():
    code = remote_code()
    assert {"configuration_gecko", "modeling_gecko", "gecko_models_gecko", "gecko_ops_cema_chunked"} <= code.keys()
    for name, source in code.items():
        compile(source, name, "exec")
        assert "import gecko" not in source and "from gecko" not in source.split('"""', 2)[-1]


def test_what_lies_beside_the_weights(model, tmp_path, caplog):
    """A card, which is never replaced; the code, also of a classifier; special ids and the tokenizer."""
    folder = tmp_path / "small"
    export(model, folder, byte_tokenizer())
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and 'from_pretrained("small", trust' in card
    assert f"{sum(weight.numel() for weight in model.parameters()):,} parameters" in card
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (256, 256, 257)
    file, kind = config["auto_map"]["AutoModelForSequenceClassification"].split(".")
    assert f"class {kind}(" in (folder / f"{file}.py").read_text()
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("ab").input_ids == [256, 97, 98]
    (folder / "README.md").write_text("mine")
    export(model, folder)
    assert (folder / "README.md").read_text() == "mine"
    AutoModelForCausalLM.from_pretrained(folder)
    assert "kernels" not in caplog.text, "the package's code has them"
    wrapped(model).save_pretrained(tmp_path / "without")
    assert not list((tmp_path / "without").glob("*.py"))
    assert not json.loads((tmp_path / "without" / "config.json").read_text()).get("auto_map")


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_are_refused(bits, tmp_path):
    pytest.importorskip("torchao")
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))
    quantize(model, bits)
    for write in (export, lambda model, folder: wrapped(model).save_pretrained(folder)):
        with pytest.raises(ValueError, match=r"must not be quantised; .*blocks\.0\..*weight is\. .*Gecko\.save"):
            write(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def wrapped(model: gecko.Gecko) -> GeckoForCausalLM:
    made = GeckoForCausalLM(GeckoConfig.of(model.config))
    made.model.gecko = model
    return made


def test_a_tokenizer_with_more_ids_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=37 and a tokenizer with 258 ids"):
        export(cases.model("gecko"), tmp_path, byte_tokenizer())
    assert not list(tmp_path.iterdir())

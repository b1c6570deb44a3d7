"""A folder with its code works where gecko cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import cases
import pytest
import torch
from transformers import AutoTokenizer

import gecko
from gecko.hf import GeckoConfig, GeckoForCausalLM, byte_tokenizer, export
from gecko.hf.export import remote_code
from gecko.quantize import quantize

PROGRAM = """
import json, sys, torch

class NoGecko:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gecko":
            raise ModuleNotFoundError("gecko is not installed here", name=name)

sys.meta_path.insert(0, NoGecko())
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()

torch.set_num_threads(1)
folder, again = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["def f", "a longer prompt"], padding=True, return_tensors="pt")
made = []
for source in (folder, again):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    made.append(out[:, inputs["input_ids"].shape[1]:].tolist())
    model.save_pretrained(again)
print(json.dumps([made, type(model).__module__, "gecko" in sys.modules]))
"""


@pytest.fixture(scope="module")
def model() -> gecko.Gecko:
    torch.manual_seed(2)
    return gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))


def test_without_gecko(model, tmp_path):
    export(model, tmp_path / "model", byte_tokenizer())
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(tmp_path / "again")],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    made, module, imported = json.loads(ran.stdout.splitlines()[-1])
    prompts = byte_tokenizer()(["def f", "a longer prompt"]).input_ids
    expected = gecko.generate(model, prompts, max_new_tokens=8, temperature=0).tokens
    assert made == [expected, expected]
    assert module.startswith("transformers_modules.") and not imported
    for folder in ("model", "again"):
        assert gecko.load(tmp_path / folder).fingerprint() == model.fingerprint()


def test_code_is_this_package_s():
    code = remote_code()
    assert {"configuration_gecko", "modeling_gecko", "gecko_model", "gecko_ops_cema_chunked"} <= code.keys()
    for name, source in code.items():
        compile(source, name, "exec")
        assert "import gecko" not in source and "from gecko" not in source.split('"""', 2)[-1]


def test_special_ids_and_tokenizer(model, tmp_path):
    export(model, tmp_path, byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (256, 256, 257)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)("ab").input_ids == [256, 97, 98]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("write", [export, lambda model, folder: wrapped(model).save_pretrained(folder)])
def test_quantised_weights_are_refused(write, bits, tmp_path):
    pytest.importorskip("torchao")
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))
    quantize(model, bits)
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

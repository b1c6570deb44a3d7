"""``import gecko`` is fast: it neither loads nor starts what only some users need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gecko

HEAVY = ("transformers", "triton", "datasets", "pyarrow", "matplotlib", "tensorboard", "tokenizers", "sentencepiece")

PROGRAM = f"""
import json, sys, time
begin = time.process_time()
import gecko
seconds = time.process_time() - begin
import torch
loaded = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([seconds, loaded, torch.cuda.is_initialized()]))
"""


def imported() -> tuple[float, list[str], bool]:
    environment = {**os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_import_is_light():
    for _ in range(4):  # minimum of processor times: other tests may be running
        seconds, loaded, cuda = imported()
        assert loaded == []
        assert not cuda
        if seconds < 3:
            break
    assert seconds < 3


def test_public_names():
    for name in ("Gecko", "GeckoConfig", "GeckoState", "convert", "load", "__version__"):
        assert hasattr(gecko, name)
    assert set(gecko.__all__) <= set(dir(gecko))

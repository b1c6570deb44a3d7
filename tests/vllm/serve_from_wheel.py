"""Train, export and serve with vLLM in a new environment that has the wheel of this checkout; compare the tokens.
``make test-vllm`` runs it. The new environment takes all other packages from ``.venv-vllm``; with ``--full`` they are
installed too, which takes minutes. The commands are those of a user: ``gecko train``, ``gecko export``, ``vllm serve``.
OpenAI's client must get the tokens of ``gecko.generate``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from documents.first_hour import PACKAGED
from support.vllm_install import install, site_packages
from support.vllm_server import vllm_serve

ROOT = Path(__file__).parents[2]
TRAINING = ("steps=8", "sequence_length=256", "evaluation.rows=4")
PROMPTS = ("def main(", "import os\nimport ", "class Error(Exception):\n    def __init__(self" * 9)
NEW = 40
VARIABLES = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of this checkout, which would keep files of the build otherwise."""
    source = folder / "source"
    source.mkdir()
    for name in PACKAGED:
        path = ROOT / name
        shutil.copytree(path, source / name) if path.is_dir() else shutil.copyfile(path, source / name)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def borrow(folder: Path, wheel: Path, lender: Path) -> None:
    """Make an environment with the wheel; all other packages, and the program vllm, are those of ``lender``."""
    python = folder / "bin" / "python"
    subprocess.run([str(lender / "bin" / "python"), "-m", "venv", str(folder)], check=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([str(python), "-m", "pip", "install", *options, str(wheel)], check=True)
    (site_packages(folder) / "borrowed.pth").write_text(f"{site_packages(lender)}\n")
    program = (lender / "bin" / "vllm").read_text(encoding="utf-8").partition("\n")[2]
    (folder / "bin" / "vllm").write_text(f"#!{python}\n{program}", encoding="utf-8")
    (folder / "bin" / "vllm").chmod(0o755)


def run(environment: Path, folder: Path) -> None:
    """Train, export, serve and compare, with the programs of an environment and in a new folder."""
    programs, model = environment / "bin", folder / "demo"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables = kept | VARIABLES | {"PATH": f"{programs}:{kept['PATH']}"}
    for command in (["train", "tiny", *TRAINING, "--out", "run"], ["export", "run", str(model)]):
        subprocess.run([str(programs / "gecko"), *command], cwd=folder, env=variables, check=True)
    settings = ("--dtype", "float32", "--max-model-len", "1024", "--served-model-name", "demo")
    with vllm_serve(programs / "vllm", model, folder / "log", *settings, environment=variables) as address:
        compare = [str(programs / "python"), __file__, "--compare", address, str(model), str(environment)]
        subprocess.run(compare, cwd=folder, env=variables, check=True)


def compare(address: str, folder: Path, environment: Path) -> None:
    """Compare the answers of a server with ``gecko.generate``, in the environment that has the wheel."""
    import openai

    import gecko

    assert Path(gecko.__file__).is_relative_to(environment), f"gecko must come from the wheel; it is {gecko.__file__}"
    client, model = openai.OpenAI(base_url=address, api_key="none"), gecko.load(folder)
    for prompt in PROMPTS:
        options = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model="demo", prompt=prompt, max_tokens=NEW, temperature=0, extra_body=options
        )
        found = answer.choices[0].model_dump()["token_ids"]
        wanted = gecko.generate(model, [256, *prompt.encode()], max_new_tokens=NEW, temperature=0).tokens[0]
        assert found == wanted, f"after {prompt!r} vLLM wrote {found}; gecko.generate writes {wanted}"
    print(f"{len(PROMPTS)} passed, 0 failed")


def main() -> None:
    if sys.argv[1:2] == ["--compare"]:
        compare(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="install all packages, instead of those of --lender")
    parser.add_argument("--lender", type=Path, default=ROOT / ".venv-vllm", help="environment with vLLM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-from-wheel-") as temporary:
        folder, environment = Path(temporary), Path(temporary) / "environment"
        wheel = build_wheel(folder)
        if options.full:
            install(environment, f"{wheel}[hf]")
        else:
            borrow(environment, wheel, options.lender.resolve())
        run(environment, folder)


if __name__ == "__main__":
    main()

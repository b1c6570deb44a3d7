"""Speed of this code beside the code of another commit, in one run.

    git worktree add --detach ../other ab0e082
    python benchmarks/paired.py ../other --write     # writes benchmarks/results/paired_PROCESSOR.md
    python benchmarks/paired.py ../other --speeds "training at 2K" "gecko train" --write    # these alone

A separate process runs each measurement. Its ``PYTHONPATH`` is one of the two trees, in turns. The table
gives the median ratio of neighbouring runs, so that a slow minute of the machine slows both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def training(length: int) -> float:
    """Tokens per second of training steps of ``tiny`` on rows of ``length`` bytes, batches of 8,192."""
    import torch

    import gecko

    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8192 // length, length + 1))

    def step() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return 8192 / _median_seconds(step, 5)


def reading() -> float:
    """Tokens per second of ``tiny`` reading 32,768 bytes without gradients."""
    import torch

    import gecko

    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny")).eval()
    tokens = torch.randint(0, 256, (1, 32_768))

    def read() -> None:
        with torch.inference_mode():
            model(tokens)

    return 32_768 / _median_seconds(read, 5)


def decoding() -> float:
    """Tokens per second of ``gecko.generate`` with ``tiny``, one row, greedy, after a prompt of 1,000 bytes."""
    import torch

    import gecko

    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny")).eval()
    prompt = torch.randint(0, 256, (1, 1_000))

    def generate(count: int) -> float:
        started = time.perf_counter()
        gecko.generate(model, prompt, max_new_tokens=count, temperature=0.0)
        return time.perf_counter() - started

    generate(8)
    return 192 / statistics.median([generate(200) - generate(8) for _ in range(5)])


def _median_seconds(work: Callable[[], None], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def training_command() -> float:
    """Tokens per second of ``gecko train tiny`` on rows of 2,048 bytes: the median of ten steps, as it reports them."""
    settings = (
        "steps=14 minutes=None sequence_length=2048 batch_size=4 evaluation.every=1000 evaluation.rows=1 "
        "evaluation.final_rows=1 checkpoint.every=1000 sample.tokens=0"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "gecko", "train", "tiny", "--out", str(run), *settings.split()]
        subprocess.run(command, check=True, capture_output=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["tokens_per_second"] for record in records if record["kind"] == "train")


WORK: dict[str, Callable[[], float]] = {
    "training at 2K": lambda: training(2048),
    "training at 8K": lambda: training(8192),
    "gecko train": training_command,
    "reading": reading,
    "decoding": decoding,
}


def output_of(tree: Path, work: str) -> str:
    """Return what one measurement prints in a process that imports the package of ``tree``."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, __file__, "--only", work]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def seconds_to_start(tree: Path, command: list[str], cold: bool) -> float:
    """Seconds of a command under ``tree``; cold without compiled bytecode, as after a new installation."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        if cold:
            environment["PYTHONPYCACHEPREFIX"] = folder
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], env=environment, check=True, capture_output=True)
        return time.perf_counter() - started


def losses_and_text(tree: Path) -> str:
    """Losses of 50 steps of ``gecko train tiny``, and the greedy text of the model that they make."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    gecko = [sys.executable, "-m", "gecko"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train = [*gecko, "train", "tiny", "--out", str(run), "steps=50", "minutes=None"]
        subprocess.run(train, env=environment, check=True, capture_output=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        generate = [*gecko, "generate", str(run), "--prompt", "def main(", "--temperature", "0"]
        text = subprocess.run(generate, env=environment, check=True, capture_output=True).stdout
    return json.dumps([[r["loss"] for r in records if "loss" in r], text.decode(errors="backslashreplace")])


def golden_logits() -> str:
    """SHA-256 of the float32 logits of every model of ``tests/golden``."""
    import torch
    from safetensors.torch import load_file

    import gecko

    folder = HERE / "tests" / "golden"
    digest = hashlib.sha256()
    for case in json.loads((folder / "manifest.json").read_text())["cases"]:
        if case["kind"] == "model":
            tensors = load_file(folder / case["file"])
            weights = {name[6:]: x.float() for name, x in tensors.items() if name.startswith("state/")}
            config, state = gecko.convert.from_reference(case["config"], weights)
            model = gecko.Gecko(config)
            model.load_state_dict(state)
            with torch.inference_mode():
                digest.update(model(tensors["input/tokens"])[0].numpy().tobytes())
    return digest.hexdigest()


STARTS = {"import gecko": ["-c", "import gecko"], "gecko --help": ["-m", "gecko", "--help"]}


def speeds(trees: tuple[Path, Path], names: Sequence[str], repeats: int) -> list[str]:
    """Rows of the table of speeds: medians of both trees, and the median ratio of neighbouring runs."""
    rows = ["| tokens per second | other | this | this / other |", "|---|---|---|---|"]
    for work in names:
        pairs = [[float(output_of(tree, work)) for tree in trees] for _ in range(repeats)]
        other, this = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio = statistics.median(after / before for before, after in pairs)
        rows.append(f"| {work} | {other:,.0f} | {this:,.0f} | {ratio:.2f} |")
    return rows


def starts(trees: tuple[Path, Path], repeats: int) -> list[str]:
    """Rows of the table of starts, in seconds, cold and warm."""
    rows = ["| seconds | other, cold | this, cold | other, warm | this, warm |", "|---|---|---|---|---|"]
    for name, command in STARTS.items():
        cells = []
        for cold in (True, False):
            pairs = [[seconds_to_start(tree, command, cold) for tree in trees] for _ in range(repeats)]
            cells += [f"{statistics.median(values):.2f}" for values in zip(*pairs, strict=True)]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return rows


def sameness(trees: tuple[Path, Path]) -> list[str]:
    """Lines that say whether both trees give the same bits."""
    training = [losses_and_text(tree) for tree in trees]
    logits = [output_of(tree, "logits") for tree in trees]
    return [
        f"- Losses of 50 steps of `gecko train tiny`, and its greedy text: {_verdict(training)}.",
        f"- float32 logits of the golden models: {_verdict(logits)}.",
    ]


def _verdict(results: list[str]) -> str:
    return "equal, bit for bit" if results[0] == results[1] else "**different**"


def main() -> None:
    """Measure both trees in turns and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path, help="Folder with the code of the other commit.")
    parser.add_argument("--only", choices=[*WORK, "logits"], help="Print one measurement of the imported package.")
    parser.add_argument(
        "--speeds", nargs="+", choices=WORK, help="Measure these speeds, and neither starts nor results."
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.only:
        print(golden_logits() if arguments.only == "logits" else WORK[arguments.only]())
        return
    import torch
    from measuring import load, of_processor, publish

    from gecko.train.throughput import describe_hardware

    trees = (arguments.other.resolve(), HERE)
    commits = [
        subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
        for tree in trees
    ]
    hardware = "; ".join(describe_hardware(torch.device("cpu")).values())
    page = [
        "# This code beside an earlier commit",
        "",
        f"{date.today()}, {hardware}. Other: {commits[0].strip()}; this: {commits[1].strip()}."
        f" Medians of {arguments.repeats} runs in turns. {load()}",
        "",
        f"Command: `python benchmarks/paired.py FOLDER {shlex.join(sys.argv[2:])}`.",
        "",
        *([] if arguments.speeds else [*sameness(trees), ""]),
        *speeds(trees, arguments.speeds or list(WORK), arguments.repeats),
        *([] if arguments.speeds else ["", *starts(trees, arguments.repeats)]),
    ]
    publish(of_processor("paired"), page, arguments.write)


if __name__ == "__main__":
    main()

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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def tiny() -> Any:
    import torch

    import gecko

    torch.manual_seed(0)
    return gecko.Gecko(gecko.GeckoConfig.preset("tiny"))


def training(length: int) -> float:
    """Tokens per second of training steps of ``tiny`` on rows of ``length`` bytes, batches of 8,192."""
    import torch

    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8192 // length, length + 1))

    def step() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return 8192 / _median_seconds(step)


def reading() -> float:
    """Tokens per second of ``tiny`` reading 32,768 bytes without gradients."""
    import torch

    model, tokens = tiny().eval(), torch.randint(0, 256, (1, 32_768))
    with torch.inference_mode():
        return 32_768 / _median_seconds(lambda: model(tokens))


def decoding() -> float:
    """Tokens per second of ``gecko.generate`` with ``tiny``, one row, greedy, after a prompt of 1,000 bytes."""
    import torch

    import gecko

    model, prompt = tiny().eval(), torch.randint(0, 256, (1, 1_000))

    def generate(count: int) -> float:
        return _seconds(lambda: gecko.generate(model, prompt, max_new_tokens=count, temperature=0.0))

    generate(8)
    return 192 / statistics.median([generate(200) - generate(8) for _ in range(5)])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    return statistics.median(_seconds(work) for _ in range(5))


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


def run_in(tree: Path, *command: str, **environment: str) -> str:
    """Return what Python prints in a process that imports the package of ``tree``."""
    own = {**os.environ, "PYTHONPATH": str(tree / "src"), **environment}
    done = subprocess.run([sys.executable, *command], env=own, check=True, capture_output=True)
    return done.stdout.decode(errors="backslashreplace")


def losses_and_text(tree: Path) -> str:
    """Losses of 50 steps of ``gecko train tiny``, and the greedy text of the model that they make."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run_in(tree, "-m", "gecko", "train", "tiny", "--out", str(run), "steps=50", "minutes=None")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        text = run_in(tree, "-m", "gecko", "generate", str(run), "--prompt", "def main(", "--temperature", "0")
    return json.dumps([[r["loss"] for r in records if "loss" in r], text])


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


def speeds(trees: Sequence[Path], names: Sequence[str], repeats: int) -> Iterator[tuple[str | float, ...]]:
    """Yield medians of both trees, and the median ratio of neighbouring runs."""
    for work in names:
        pairs = [[float(run_in(tree, __file__, "--only", work)) for tree in trees] for _ in range(repeats)]
        ratio = statistics.median(after / before for before, after in pairs)
        yield work, *map(statistics.median, zip(*pairs, strict=True)), ratio


def starts(trees: Sequence[Path], repeats: int) -> Iterator[tuple[str | float, ...]]:
    """Yield the seconds of starts, cold (without compiled bytecode, as after a new installation) and warm."""
    for name, command in STARTS.items():
        cells = list[float]()
        for cold in (True, False):
            pairs = []
            for tree in (*trees,) * repeats:
                with tempfile.TemporaryDirectory() as folder:
                    environment = {"PYTHONPYCACHEPREFIX": folder} if cold else {}
                    pairs.append(_seconds(lambda: run_in(tree, *command, **environment)))  # noqa: B023
            cells += [statistics.median(pairs[0::2]), statistics.median(pairs[1::2])]
        yield f"`{name}`", *cells


def sameness(trees: Sequence[Path]) -> str:
    """Return lines that say whether both trees give the same bits."""
    found = {
        "Losses of 50 steps of `gecko train tiny`, and its greedy text": [losses_and_text(tree) for tree in trees],
        "float32 logits of the golden models": [run_in(tree, __file__, "--only", "logits") for tree in trees],
    }
    verdicts = {what: "equal, bit for bit" if one == other else "**different**" for what, (one, other) in found.items()}
    return "\n".join(f"- {what}: {verdict}." for what, verdict in verdicts.items())


def main() -> None:
    """Measure both trees in turns and print the page. Nothing of the package is imported before a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="Folder with the code of the other commit.")
    parser.add_argument("--only", choices=[*WORK, "logits"], help="Print one measurement of the imported package.")
    parser.add_argument("--speeds", nargs="+", choices=WORK, help="Measure these speeds, and nothing else.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    only = parser.parse_args().only
    if only:
        print(golden_logits() if only == "logits" else WORK[only]())
        return
    from measuring import of_processor, parsed, publish, table

    given = parsed(parser)
    trees = given.other.resolve(), HERE
    commits = [
        subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
        for tree in trees
    ]
    columns = ["tokens per second", "other|,.0f", "this|,.0f", "this / other|.2f"]
    parts = [table(columns, speeds(trees, given.speeds or list(WORK), given.repeats))]
    if not given.speeds:
        columns = ["seconds", "other, cold|.2f", "this, cold|.2f", "other, warm|.2f", "this, warm|.2f"]
        parts = [sameness(trees), *parts, table(columns, starts(trees, given.repeats))]
    publish(
        of_processor("paired"), given, "This code beside an earlier commit",
        f"Other: {commits[0].strip()}; this: {commits[1].strip()}. Medians of {given.repeats} runs in turns.", *parts,
    )  # fmt: skip


if __name__ == "__main__":
    main()

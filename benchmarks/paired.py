"""Speed of this code beside the code of another commit, in one run.

    git worktree add --detach ../other ab0e082
    python benchmarks/paired.py ../other --repeats 20 --write     # writes benchmarks/results/paired_PROCESSOR.md
    python benchmarks/paired.py ../other --speeds "training at 2K" "gecko train" --write    # these alone

A separate process runs each measurement. Its ``PYTHONPATH`` is one of the two trees, in turns. The table gives the
median of the ratios of the times of neighbouring runs, so that a slow minute of the machine slows both, and its 95 %
interval by order statistics. This code is as fast where the interval lies below 1.02 or contains 1.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def tiny() -> Any:
    import torch

    import gecko

    torch.manual_seed(0)
    return gecko.Gecko(gecko.GeckoConfig.preset("tiny"))


def training(length: int) -> float:
    """Tokens per second of training steps of ``tiny`` on rows of ``length`` bytes, in batches of at least 8,192."""
    import torch

    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (max(1, 8192 // length), length + 1))

    def step() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return tokens[:, 1:].numel() / _median_seconds(step)


def reading() -> float:
    """Tokens per second of ``tiny`` reading 32,768 bytes without gradients."""
    import torch

    model, tokens = tiny().eval(), torch.randint(0, 256, (1, 32_768))
    with torch.inference_mode():
        return 32_768 / _median_seconds(lambda: model(tokens))


def decoding(rows: int) -> float:
    """Tokens per second of ``gecko.generate`` with ``tiny``, greedy, after prompts of 1,000 bytes."""
    import torch

    import gecko

    model, prompts = tiny().eval(), torch.randint(0, 256, (rows, 1_000))

    def generate(count: int) -> float:
        return _seconds(lambda: gecko.generate(model, prompts, max_new_tokens=count, temperature=0.0))

    generate(8)
    return rows * 192 / statistics.median([generate(200) - generate(8) for _ in range(5)])


def first_token() -> float:
    """First tokens per second of ``gecko.generate`` with ``tiny``, after a prompt of 1,000 bytes."""
    import torch

    import gecko

    model, prompt = tiny().eval(), torch.randint(0, 256, (1, 1_000))
    generate = functools.partial(gecko.generate, model, prompt, max_new_tokens=1, temperature=0.0)
    return 1 / statistics.median([_median_seconds(generate) for _ in range(5)])


def generate_command() -> float:
    """Starts per second of ``gecko generate books`` for one token, once everything is compiled and in memory."""
    command = [sys.executable, "-m", "gecko", "generate", "books", "--prompt", "It was ", "-n", "1", "--seed", "1"]
    return 1 / _median_seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def server() -> float:
    """Tokens per second of ``gecko serve books`` for 8 clients at once, 48 texts of 64 tokens after 500 characters."""
    request = {"model": "books", "prompt": "It was a bright cold day. " * 20, "max_tokens": 64, "seed": 1}
    command = [sys.executable, "-m", "gecko", "serve", "books", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None, "the server's output must be read"
    try:
        found = re.search(r"http://\S+:(\d+)", process.stdout.readline())
        assert found, "the server must print its address; run `gecko serve books` by hand"
        address = f"http://127.0.0.1:{found[1]}/v1/completions"

        def ask(number: int) -> int:
            content = json.dumps({**request, "prompt": f"{number} {request['prompt']}"}).encode()
            asked = urllib.request.Request(address, content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked) as response:
                return json.load(response)["usage"]["completion_tokens"]

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(ask, range(16)))
            started = time.perf_counter()
            return sum(clients.map(ask, range(16, 64))) / (time.perf_counter() - started)
    finally:
        process.kill()
        process.wait()


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
    "training at 32K": lambda: training(32_768),
    "gecko train": training_command,
    "reading": reading,
    "decoding": lambda: decoding(1),
    "decoding, 16 rows": lambda: decoding(16),
    "first token": first_token,
    "start of gecko generate": generate_command,
    "server under load": server,
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
    """Yield medians of both trees, the median of the ratios of times of neighbouring runs, and its interval."""
    from scipy.stats import quantile_test

    for work in names:
        pairs = [[float(run_in(tree, __file__, "--only", work)) for tree in trees] for _ in range(repeats)]
        ratios = [before / after for before, after in pairs]
        medians = map(statistics.median, zip(*pairs, strict=True))
        yield work, *medians, statistics.median(ratios), *quantile_test(ratios, q=1, p=0.5).confidence_interval()


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
    columns = ["per second", "other|,.1f", "this|,.1f", "time, this / other|.3f", "from|.3f", "to|.3f"]
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

"""Effect of long context on the loss: models trained on long documents, with and without a working memory.

    python benchmarks/long_context.py documents          # source of installed packages, as source/{train,held_out}
    python benchmarks/long_context.py train --data books # gecko train on consecutive rows, for every model
    python benchmarks/long_context.py score --data books # losses by context; results/evidence/long_context/books.json
    python benchmarks/long_context.py page               # results/evidence/long_context/README.md

Training carries the state from row to row, so that documents are read from start to end. Held-out documents are read
without resets, with the state reset at regular distances, and with only the memory reset. All losses are of the same
bytes, so differences are paired; intervals are bootstrapped over blocks of a document.

Repeated names are rare words that the document used before, but not within the last ``NEAR`` bytes. The match predictor
predicts the byte that followed the longest equal context within a window. Its predictions are mixed with those of a
model, with weights that are fitted on the other documents. The gain shows how much information the window holds.

``train`` can be interrupted, and continues. All paths are relative to the current folder.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kept
import numpy as np
import torch
from measuring import START, find_model
from numpy.typing import NDArray
from torch import Tensor

import gecko
from gecko.eval.results import Results, Score, Values, bootstrap_ratio
from gecko.inference.prefill import inference
from gecko.io.files import whole_file
from gecko.runtime.process import keep_freed_memory
from gecko.state import GeckoState

FOLDER = kept.FOLDER / "long_context"

MODELS = {
    "no memory": "compare_no_memory", "memory": "compare_gecko", "memory, keys of 11.31": "compare_longer_keys",
}  # fmt: skip
"""Recipes by name. The first is the control."""
HELD_OUT_PACKAGES = ("fontTools", "joblib", "mpmath", "networkx", "nltk", "rich")
LARGEST_PACKAGE = 2**19
"""Bytes of a package that are used; packages with less than half of it are not."""

LANES, ROW = 8, 2048
LENGTH, FIRST = 2**18, 2**14
"""Bytes of a held-out document that are read, and the place of the first that is scored."""
PIECE, BLOCK = 2048, 1024
NEAR = 2048
CONTEXTS = {"2K": 2**11, "64K": 2**16, "all": 2**62}
NO_MATCH = 2**63 - 1
"""Distance beyond every context."""
COMMON = 2000
"""The most frequent words of the training texts, which are not rare."""
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{3,}")
ORDERS = (5, 8, 12, 20)
"""Lengths in bytes of the contexts that the match predictor compares."""
WEIGHTS = np.linspace(0, 0.98, 50)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Mode:
    """Way to read a document; numbers are bytes."""

    state_reset: int
    """Distance between empty states."""
    memory_reset: int
    """Distance between empty memories."""


MODES = {name: Mode(every, every) for name, every in CONTEXTS.items()} | {"memory of 2K": Mode(2**62, NEAR)}


def write_packages(target: Path) -> None:
    """Write a text per installed package of Python: its source files, in the order of their names."""
    installed = Path(sysconfig.get_path("purelib"))
    for folder in sorted(path for path in installed.iterdir() if path.is_dir()):
        files = sorted(folder.rglob("*.py"))
        parts = (b"# %s\n%s\n" % (str(file.relative_to(installed)).encode(), file.read_bytes()) for file in files)
        text = b"".join(parts)[:LARGEST_PACKAGE]
        if len(text) < LARGEST_PACKAGE // 2 or folder.name == "gecko":
            continue
        part = target / ("held_out" if folder.name in HELD_OUT_PACKAGES else "train")
        part.mkdir(parents=True, exist_ok=True)
        with whole_file(part / f"{folder.name}.txt") as temporary:
            temporary.write_bytes(text.decode("utf-8", "ignore").encode())


def run_folder(data: str, model: str, seed: int) -> Path:
    return Path("runs") / f"long-{data}" / f"{re.sub('[ ,]+', '-', model)}-{seed}"


def train(data: str, models: Sequence[str], steps: int, seed: int) -> None:
    for name in models:
        command = [
            "train", MODELS[name], "--resume", "--out", str(run_folder(data, name, seed)), f"seed={seed}",
            f"steps={steps}", f"batch_size={LANES}", f"sequence_length={ROW}", "precision=auto",
            "data.carry_state=true", f"data.source={data}/train", f"data.validation={data}/held_out",
            "evaluation.rows=16", "evaluation.final_rows=64",
        ]  # fmt: skip
        print(shlex.join(["gecko", *command]), flush=True)
        subprocess.run([sys.executable, "-m", "gecko", *command], check=True)


def byte_losses(model: gecko.Gecko, texts: Sequence[Bytes]) -> dict[str, Values]:
    """Return the loss of every byte in nats, (texts, ``LENGTH``), for every mode that the model has."""
    modes = {name: mode for name, mode in MODES.items() if mode.state_reset == mode.memory_reset or _has_memory(model)}
    text = torch.from_numpy(np.stack(texts)).long()
    rows = len(text)
    state, found = model.empty_state(rows * len(modes)), []
    with inference(model):
        for begin in range(0, LENGTH, PIECE):
            targets = text[:, begin : begin + PIECE]
            before = text[:, begin - 1 : begin] if begin else START.expand(rows, 1)
            resets = torch.tensor([[begin % mode.state_reset == 0, begin % mode.memory_reset == 0]
                                   for mode in modes.values()]).repeat_interleave(rows, 0)  # fmt: skip
            first = torch.where(resets[:, :1], START, before.repeat(len(modes), 1))
            tokens = torch.cat([first, targets[:, :-1].repeat(len(modes), 1)], dim=1)
            state = _reset(model, state, *resets.unbind(1))
            losses, state = model.token_losses(tokens, targets.repeat(len(modes), 1), state=state)
            found.append(losses.float())
    whole = torch.cat(found, dim=1).unflatten(0, (len(modes), rows)).numpy()
    return dict(zip(modes, whole, strict=True))


def _has_memory(model: gecko.Gecko) -> bool:
    return model.config.memory != "none"


def with_empty_memory(model: gecko.Gecko, state: GeckoState, rows: Tensor) -> GeckoState:
    """Return the state with empty memory in the given ``rows`` (B,) bool."""
    fresh = model.empty_state(state.batch_size)
    mixers = []
    for mixer, empty in zip(state.mixers, fresh.mixers, strict=True):
        if mixer.memory is None or empty.memory is None:
            raise ValueError("the model must have a working memory; this one has none. Try a Gecko.")
        mixers.append(replace(mixer, memory=empty.memory.where(rows, mixer.memory)))
    return replace(state, mixers=tuple(mixers))


def _reset(model: gecko.Gecko, state: GeckoState, states: Tensor, memories: Tensor) -> GeckoState:
    """Return the state with empty memories and empty states in the marked rows."""
    kept = with_empty_memory(model, state, memories) if _has_memory(model) else state
    return model.empty_state(state.batch_size).where(states, kept)


def repeated_names(text: bytes, common: set[bytes]) -> NDArray[np.bool_]:
    """Return for each byte whether it is of a rare word that was used before, the last time beyond ``NEAR`` bytes."""
    marks, last = np.zeros(len(text), bool), dict[bytes, int]()
    for match in WORD.finditer(text):
        word = match.group()
        if word not in common and match.start() - last.get(word, match.start()) > NEAR:
            marks[match.start() : match.end()] = True
        last[word] = match.start()
    return marks


def common_words(folder: Path) -> set[bytes]:
    counts = Counter(word for path in sorted(folder.glob("*.txt")) for word in WORD.findall(path.read_bytes()))
    return {word for word, _ in counts.most_common(COMMON)}


def matches(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return for each order and byte the distance to the last equal context, or ``NO_MATCH``, and whether the same byte
    followed it."""
    distances = np.full((len(ORDERS), len(text)), NO_MATCH)
    hits = np.zeros((len(ORDERS), len(text)), bool)
    for row, order in enumerate(ORDERS):
        last: dict[bytes, int] = {}
        for place in range(order, len(text)):
            context = text[place - order : place]
            earlier = last.get(context)
            if earlier is not None:
                distances[row, place], hits[row, place] = place - earlier, text[earlier] == text[place]
            last[context] = place
    return distances, hits


def mixed_losses(losses: Values, found: Sequence[tuple[Any, Any]], window: int) -> Values:
    """Return the losses (texts, L) after mixing in the match predictor with contexts of the last ``window`` bytes."""
    orders = np.stack([_longest(distances <= window) for distances, _ in found])
    hits = np.stack([
        np.take_along_axis(right, np.maximum(order, 0)[None], 0)[0]
        for (_, right), order in zip(found, orders, strict=True)
    ])  # fmt: skip
    mixed = losses.copy()
    for text in range(len(losses)):
        others = np.arange(len(losses)) != text
        for order in range(len(ORDERS)):
            places = orders[others] == order
            if places.any():
                weight = _best_weight(losses[others][places], hits[others][places])
                here = orders[text] == order
                mixed[text, here] = _mix(losses[text, here], hits[text, here], weight)
    return mixed


def _longest(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the longest order with a match, (L,); -1 for none."""
    last = len(ORDERS) - 1 - inside[::-1].argmax(0)
    return np.where(inside.any(0), last, -1)


def _mix(losses: Values, hits: NDArray[np.bool_], weight: float) -> Values:
    return -np.log(weight * hits + (1 - weight) * np.exp(-losses))


def _best_weight(losses: Values, hits: NDArray[np.bool_]) -> float:
    return float(min(WEIGHTS, key=lambda weight: _mix(losses, hits, weight).mean()))


def score(data: str, models: Sequence[str], seeds: Sequence[int], threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    files = [path for path in sorted(Path(data, "held_out").glob("*.txt")) if path.stat().st_size >= LENGTH]
    if len(files) < 2:
        raise FileNotFoundError(
            f"{data}/held_out must hold two texts of {LENGTH:,} bytes as .txt; it has {len(files)}."
        )
    raw = [path.read_bytes()[:LENGTH] for path in files]
    texts = [np.frombuffer(bytearray(text), np.uint8) for text in raw]
    common = common_words(Path(data, "train"))
    names = np.stack([repeated_names(text, common) for text in raw])
    kinds = {"all bytes": np.ones_like(names), "repeated names": names, "other bytes": ~names}
    found = [matches(text) for text in raw]
    scores: list[Score] = []
    for seed in seeds:
        losses = {}
        for name in models:
            losses[name] = byte_losses(gecko.load(find_model(str(run_folder(data, name, seed)))), texts)
            print(data, name, seed, flush=True)
        for kind, marks in kinds.items():
            scores += _kind_scores(losses, marks, {"kind": kind, "seed": seed})
            scores += _match_scores(losses, found, marks, {"kind": kind, "seed": seed})
    runs = {name: json.loads((find_model(str(run_folder(data, name, seeds[0]))) / "recipe.json").read_text("utf-8"))
            for name in models}  # fmt: skip
    steps = next(iter(runs.values()))["steps"]
    settings = {"texts": [path.name for path in files], "bytes": LENGTH, "first": FIRST, "steps": steps, "runs": runs}
    command = f"python benchmarks/long_context.py {shlex.join(sys.argv[1:])}"
    kept.keep_results(f"long_context/{data}", Results("long context", scores, settings, seeds[0]), command)


def _kind_scores(
    losses: Mapping[str, Mapping[str, Values]], marks: NDArray[np.bool_], where: Mapping[str, Any]
) -> Iterator[Score]:
    control = losses[next(iter(MODELS))]
    for name, found in losses.items():
        place = {"model": name, **where}
        for mode, values in found.items():
            yield _score("loss", values, marks, {**place, "mode": mode})
        yield _score("2K less 64K", found["2K"] - found["64K"], marks, place)
        if found is not control:
            beyond = (found["2K"] - found["64K"]) - (control["2K"] - control["64K"])
            yield _score("2K less 64K, less the control's", beyond, marks, place)
            yield _score("control less model, all", control["all"] - found["all"], marks, place)
            yield _score("memory of 2K less all", found["memory of 2K"] - found["all"], marks, place)


def _match_scores(
    losses: Mapping[str, Mapping[str, Values]], found: Sequence[tuple[Any, Any]], marks: NDArray[np.bool_],
    where: Mapping[str, Any],
) -> Iterator[Score]:  # fmt: skip
    for name, modes in losses.items():
        plain = modes["all"].astype(np.float64)
        mixed = {context: mixed_losses(plain, found, size) for context, size in CONTEXTS.items()}
        for context, values in mixed.items():
            yield _score("match predictor's gain", plain - values, marks, {"model": name, **where, "mode": context})
        yield _score("matches 2K less 64K", mixed["2K"] - mixed["64K"], marks, {"model": name, **where})


def _score(name: str, values: Values, marks: NDArray[np.bool_], where: Mapping[str, Any]) -> Score:
    """Return the mean over the marked bytes from ``FIRST`` on, with its interval over blocks."""
    inside, marked = (x[:, FIRST:].reshape(-1, BLOCK) for x in (values.astype(np.float64), marks))
    sums, counts = (inside * marked).sum(1), marked.sum(1).astype(np.float64)
    interval = bootstrap_ratio(sums, counts, "blocks", 0)
    return Score(name, float(sums.sum() / counts.sum()), int(counts.sum()), "bytes", interval, where)


def page() -> str:
    lines = [
        "# Effect of long context on the loss, with and without a working memory", "",
        "Made by `python benchmarks/long_context.py page` of `../scores.csv.gz`. Models of 1 M parameters on "
        "bytes; nats per byte with 95 % intervals over blocks of 1,024 bytes. A positive number is a gain.", "",
    ]  # fmt: skip
    for name in kept.names("long_context"):
        lines += _tables(Path(name).name, kept.read(name))
    return "\n".join(lines) + "\n"


GAINS = ("2K less 64K", "2K less 64K, less the control's", "memory of 2K less all", "control less model, all",
         "matches 2K less 64K")  # fmt: skip
HEADINGS = ("context of 64K against 2K", "the same, more than without memory", "whole memory against one of 2K",
            "memory against none", "match predictor, 64K against 2K")  # fmt: skip


def _tables(data: str, record: Mapping[str, Any]) -> Iterator[str]:
    settings, hardware = record["settings"], "; ".join(record["hardware"].values())
    yield f"## {data}"
    yield ""
    yield (
        f"`{record['command']}`, commit {str(record.get('commit'))[:9]}, {hardware}. Held-out documents: "
        f"{', '.join(Path(name).stem for name in settings['texts'])}; bytes {settings['first']:,} to "
        f"{settings['bytes']:,} of each. Training: {settings['steps']:,} steps of {LANES} rows of {ROW:,} bytes."
    )
    yield ""
    for note in record["notes"]:
        yield note
        yield ""
    yield "| bytes | model | seed | loss, whole past | " + " | ".join(HEADINGS) + " |"
    yield "|---|---|---:|---:|" + "---:|" * len(GAINS)
    cases = dict.fromkeys(tuple(one["where"][key] for key in ("kind", "model", "seed")) for one in record["scores"])
    for case in cases:
        own = [one for one in record["scores"] if tuple(one["where"][key] for key in ("kind", "model", "seed")) == case]
        whole = next(one for one in own if one["name"] == "loss" and one["where"]["mode"] == "all")
        cells = [_cell(next((one for one in own if one["name"] == name), None)) for name in GAINS]
        first = f"{case[0]} ({whole['n']:,})", case[1], str(case[2]), f"{whole['value']:.4f}"
        yield f"| {' | '.join([*first, *cells])} |"
    yield ""


def _cell(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return ""
    low, high = score["interval"]["low"], score["interval"]["high"]
    return f"{score['value']:+.4f} [{low:+.4f}, {high:+.4f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("documents", "train", "score", "page"))
    parser.add_argument("--data", default="books", help="folder with train/ and held_out/, each of .txt")
    parser.add_argument("--models", type=lambda text: text.split(";"), default=list(MODELS), help="separated by ;")
    parser.add_argument("--steps", type=int, default=610, help="train: of 16,384 bytes each")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"--models must be of {'; '.join(MODELS)}; got {'; '.join(sorted(unknown))}")
    if arguments.part == "score" and next(iter(MODELS)) not in arguments.models:
        parser.error(f"--models must contain {next(iter(MODELS))}, which the others are compared with")
    if arguments.part == "documents":
        write_packages(Path("source"))
    elif arguments.part == "train":
        for seed in arguments.seeds:
            train(arguments.data, arguments.models, arguments.steps, seed)
    elif arguments.part == "score":
        score(arguments.data, arguments.models, arguments.seeds, arguments.threads)
    else:
        (FOLDER / "README.md").write_text(page(), encoding="utf-8")
        print(page())


if __name__ == "__main__":
    main()

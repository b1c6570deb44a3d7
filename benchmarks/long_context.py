"""Which form of the memory uses the past in source trees: a million parameters, three seeds, eight test packages.

    python benchmarks/long_context.py --source source --out runs/past --jobs 2    # rates, then the models; the table
    python benchmarks/long_context.py --source source --out runs/past --only linear

The same command continues after an interruption. Every ended run adds a line for each package to
``results/evidence/past.csv``. ``--source`` holds one text a package, made of this Python's installed packages if the
folder is not there. Training carries the state from row to row, so that packages are read from start to end.

**Splits.** ``TEST`` packages choose nothing and train no model of this table. ``TUNING`` packages choose each form's
rate, of three with a fifth of the steps. The others train, without ``COPIES``, which hold sources of test packages.

**Measure.** Repeated names are rare words that the package used before, the last time more than ``NEAR`` bytes ago; new
names are rare words at their first use. Both are the same kind of text, and only the first profit from the past. So a
form uses the past as far as its lead over the model without memory is larger on repeated names than on new ones: a
difference of differences, without a state that training never saw. Beside it stands what the whole past is worth more
than the last ``NEAR`` bytes, with an empty state every ``NEAR`` bytes.

**Margin**, stated before the first run: a form uses the past if it leads on repeated names, and if its lead there is
more than 0.01 nats per byte (``MARGIN``) above that on new names, both by the whole interval over seeds and packages.
Intervals have 95 % for all compared forms together (Bonferroni). The rate of a form is the best one after 2 MB of 10.

``python benchmarks/evidence.py --write`` also makes results/evidence/long_context/README.md: older results of one seed,
by the script of e862569, on packages that no setting was tuned on.
"""

from __future__ import annotations

import hashlib
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest import mock

import kept
import numpy as np
import torch
from capacity import FORMS, LINEAR, NONE, PAPER
from measuring import START, parser_of
from measuring import table as markdown
from numpy.typing import NDArray
from tables import WHERE, Interval, Table, arguments, best, over_seeds_and_documents, rows_of, trained
from torch import Tensor

from gecko.experiments.rows import grouped
from gecko.inference.prefill import inference
from gecko.io.files import whole_folder
from gecko.models.gecko import Gecko, load

FOLDER = kept.FOLDER / "long_context"
BEGIN, END = "<!-- benchmarks/long_context.py -->\n", "<!-- end past -->\n"
"""Marks of the table in docs/evidence.md, which ``benchmarks/evidence.py --write`` renews."""
MARGIN = 0.01
NAMES = (
    PAPER, "adaptive, learned temperature", "adaptive, keys of 2√width", "adaptive, norm of the sum, one gate",
    "adaptive, gated interpolation", LINEAR, NONE,
)  # fmt: skip
"""Forms of ``capacity.FORMS``; the last is the control."""
WIDTH = 32
"""Key width of a head of ``compare_gecko``."""
TEST = ("aiohttp", "hypothesis", "matplotlib", "narwhals", "pandas", "pydantic", "sympy", "werkzeug")
TUNING = ("fontTools", "joblib", "mpmath", "networkx", "nltk", "rich")
COPIES = ("gecko", "mpl_toolkits", "multiprocess", "pip", "setuptools")
LARGEST_PACKAGE = 2**19
"""Bytes of a package that are used; packages with less than half of it are not."""
RATES, SEEDS, STEPS, TUNING_STEPS = (4e-3, 8e-3, 1.6e-2), 3, 610, 122
LENGTH, FIRST, NEAR = 2**18, 2**14, 2048
"""Bytes of a package that are read, the place of the first that is scored, and bytes that are no past."""
COMMON = 2000
"""The most frequent words of the training texts, which are not rare."""
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{3,}")
KINDS = ("repeated", "new", "other")
COLUMNS = (
    "split", "form", "seed", "rate", "steps", "package",
    *(f"{kind}{value}" for kind in KINDS for value in (" bytes", "", f" with {NEAR} bytes of past")),
    "texts", *WHERE,
)  # fmt: skip
LEVEL = 0.05 / (len(NAMES) - 1)
"""Error level of an interval, by Bonferroni: six forms are compared with one."""
Measure = Callable[[Mapping[str, str]], float]


def write_packages(target: Path) -> None:
    """Write a text per installed package of Python: its source files, in the order of their names."""
    installed = Path(sysconfig.get_path("purelib"))
    for folder in sorted(path for path in installed.iterdir() if path.is_dir() and path.name not in COPIES):
        files = sorted(folder.rglob("*.py"))
        parts = (b"# %s\n%s\n" % (str(file.relative_to(installed)).encode(), file.read_bytes()) for file in files)
        text = b"".join(parts)[:LARGEST_PACKAGE]
        if len(text) < LARGEST_PACKAGE // 2:
            continue
        part = target / ("test" if folder.name in TEST else "tuning" if folder.name in TUNING else "train")
        part.mkdir(exist_ok=True)
        (part / f"{folder.name}.txt").write_bytes(text.decode("utf-8", "ignore").encode())


def digest(source: Path) -> str:
    """Return eight digits for all texts.

    Raises:
        FileNotFoundError: packages of a split are missing. ValueError: one of them is shorter than what is read of it.
    """
    missing = [name for split, names in (("test", TEST), ("tuning", TUNING)) for name in names
               if not (source / split / f"{name}.txt").is_file()]  # fmt: skip
    if missing:
        raise FileNotFoundError(f"{source} must hold a text of each test and tuning package; it lacks {missing}.")
    short = [name for name in (*TEST, *TUNING) for path in source.glob(f"*/{name}.txt") if path.stat().st_size < LENGTH]
    if short:
        raise ValueError(f"a text of a test or tuning package must have at least {LENGTH:,} bytes; {short} have less.")
    found = hashlib.sha256()
    for path in sorted(source.glob("*/*.txt")):
        found.update(str(path.relative_to(source)).encode() + path.read_bytes())
    return found.hexdigest()[:8]


@dataclass(frozen=True)
class Planned:
    form: str
    seed: int
    rate: float
    split: str
    source: Path
    out: Path
    texts: str
    steps: int

    @property
    def key(self) -> tuple[str, ...]:
        return self.split, self.form, str(self.seed), f"{self.rate:g}", str(self.steps)

    @property
    def packages(self) -> tuple[str, ...]:
        return TEST if self.split == "test" else TUNING

    @property
    def lines(self) -> int:
        return len(self.packages)

    @property
    def folder(self) -> Path:
        return self.out / re.sub("[^a-z0-9.]+", "-", "-".join(self.key).lower())

    def settings(self) -> list[str]:
        """Return the overrides of ``compare_gecko``."""
        return [
            *(f"model.{key}={str(value).lower()}" for key, value in FORMS[self.form].model(WIDTH).items()),
            f"seed={self.seed}", f"steps={self.steps}", f"optimizer.learning_rate={self.rate:g}", "batch_size=8",
            "sequence_length=2048", "data.carry_state=true", f"data.source={self.source / 'train'}",
            f"data.validation={self.source / 'tuning'}", "evaluation.rows=16", "evaluation.final_rows=64",
            "sample.tokens=0",
        ]  # fmt: skip


def run(planned: Planned) -> list[tuple[object, ...]]:
    """Train and score a model; return its lines of the table: NaN for a rate with which training diverges."""
    with mock.patch("gecko.models.gecko.GatedAttention", FORMS[planned.form].mixer):
        checkpoint, where = trained("compare_gecko", planned.settings(), planned.folder)
        if checkpoint is None:
            values = [math.nan] * 3 * len(KINDS)
            return [(*planned.key, name, *values, planned.texts, *where) for name in planned.packages]
        model = load(checkpoint).eval()
    raw = {name: (planned.source / planned.split / f"{name}.txt").read_bytes()[:LENGTH] for name in planned.packages}
    losses = byte_losses(model, torch.stack([torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in raw.values()]))
    common, lines = common_words(planned.source / "train"), []
    for (name, text), of_package in zip(raw.items(), losses.unbind(1), strict=True):
        values: list[object] = []
        for mask in kinds(text, common):
            mask[:FIRST] = False
            values += [int(mask.sum()), *(f"{x:.5f}" for x in of_package[:, mask].double().mean(1).tolist())]
        lines.append((*planned.key, name, *values, planned.texts, *where))
    return lines


def byte_losses(model: Gecko, texts: Tensor) -> Tensor:
    """Return the loss of every byte of texts (packages, L) in nats, with its whole past and with an empty state every
    ``NEAR`` bytes, (2, packages, L)."""
    text, found = texts.long().repeat(2, 1), []
    rows, state = len(text), model.empty_state(len(text))
    with inference(model):
        for begin in range(0, text.shape[1], NEAR):
            empty, targets = torch.arange(rows) >= (rows // 2 if begin else 0), text[:, begin : begin + NEAR]
            first = torch.where(empty[:, None], START, text[:, max(0, begin - 1) : max(1, begin)])
            state = model.empty_state(rows).where(empty, state)
            losses, state = model.token_losses(torch.cat([first, targets[:, :-1]], 1), targets, state=state)
            found.append(losses.float())
    return torch.cat(found, 1).unflatten(0, (2, rows // 2))


def kinds(text: bytes, common: set[bytes]) -> tuple[NDArray[np.bool_], ...]:
    """Return for each byte whether it is of a name that is repeated from beyond ``NEAR`` bytes, of a new one, or other.

    Bytes of rare words that were used within the last ``NEAR`` bytes are of no kind.
    """
    repeated, new, near, last = *(np.zeros(len(text), bool) for _ in range(3)), dict[bytes, int]()
    for match in WORD.finditer(text):
        if (word := match.group()) not in common:
            before = last.get(word)
            kind = new if before is None else repeated if match.start() - before > NEAR else near
            kind[match.start() : match.end()] = True
            last[word] = match.start()
    return repeated, new, ~(repeated | new | near)


def common_words(folder: Path) -> set[bytes]:
    counts = Counter(word for path in sorted(folder.glob("*.txt")) for word in WORD.findall(path.read_bytes()))
    return {word for word, _ in counts.most_common(COMMON)}


def whole_loss(row: Mapping[str, str]) -> float:
    """Return the loss of all bytes that have a kind."""
    sizes = [float(row[f"{kind} bytes"]) for kind in KINDS]
    return sum(size * float(row[kind]) for size, kind in zip(sizes, KINDS, strict=True)) / sum(sizes)


def repeated_loss(row: Mapping[str, str]) -> float:
    return float(row["repeated"])


def past_gain(row: Mapping[str, str]) -> float:
    """Return by how much repeated names are more likely than new ones."""
    return float(row["new"]) - float(row["repeated"])


def reset_gain(row: Mapping[str, str]) -> float:
    """Return what the whole past is worth on repeated names, against an empty state every ``NEAR`` bytes."""
    return float(row[f"repeated with {NEAR} bytes of past"]) - float(row["repeated"])


def by_package(
    split: str, form: str, steps: int, column: str, measure: Measure, packages: Sequence[str]
) -> dict[float, list[float]]:
    """Return a measure on all packages of a split, by the seed or rate of the runs that have all of them."""
    found: dict[float, dict[str, float]] = {}
    for row in rows_of("past.csv"):
        if (row["split"], row["form"], row["steps"]) == (split, form, str(steps)):
            found.setdefault(float(row[column]), {})[row["package"]] = measure(row)
    return {place: [of[name] for name in packages] for place, of in found.items() if of.keys() == set(packages)}


def tuned(form: str, steps: int = TUNING_STEPS) -> float | None:
    """Return the rate with the least loss on the tuning packages; None if not all rates were run."""
    losses = by_package("tuning", form, steps, "rate", whole_loss, TUNING)
    return best({rate: fmean(of) for rate, of in losses.items()}) if losses.keys() == set(RATES) else None


def measured(form: str, measure: Measure) -> dict[float, list[float]]:
    """Return a measure on the test packages by seed."""
    return by_package("test", form, STEPS, "seed", measure, TEST)


def contrast(form: str, base: str, measure: Measure) -> Interval | None:
    """Return a measure of a form less that of ``base``; None without a common seed."""
    one, other = measured(form, measure), measured(base, measure)
    seeds = sorted(one.keys() & other.keys())
    return over_seeds_and_documents([np.subtract(one[seed], other[seed]) for seed in seeds], LEVEL) if seeds else None


def uses_the_past(form: str) -> bool:
    """Return whether a form fulfils the condition that was stated before the first run."""
    past, loss = (contrast(form, NONE, measure) for measure in (past_gain, repeated_loss))
    return past is not None and loss is not None and past.low > MARGIN and loss.high < 0


def table() -> str:
    """Return a Markdown table of the forms."""
    if not any(measured(form, repeated_loss) for form in NAMES):
        return "Not run yet.\n"
    rows = []
    for form in NAMES:
        losses = measured(form, repeated_loss)
        changes = [contrast(form, NONE, measure) if form != NONE else None
                   for measure in (repeated_loss, past_gain, reset_gain)]  # fmt: skip
        against = contrast(form, PAPER, repeated_loss) if form != PAPER else None
        loss = fmean(map(fmean, losses.values())) if losses else "not run"
        cells = ["" if change is None else change.shown() for change in (*changes, against)]
        rows.append((form, tuned(form), len(losses), loss, *cells))
    columns = [
        "memory", "rate, best after 2 MB|g", "seeds|d", "nats per byte of repeated names|.4f", "minus no memory",
        "lead on them less lead on new names", f"gain of all over {NEAR:,} bytes, less that without memory",
        "minus the paper's",
    ]  # fmt: skip
    return markdown(columns, rows) + "\n"


CASE = ("kind", "model", "seed")
GAINS = ("2K less 64K", "2K less 64K, less the control's", "memory of 2K less all", "control less model, all",
         "matches 2K less 64K")  # fmt: skip
HEADINGS = ("context of 64K against 2K", "the same, more than without memory", "whole memory against one of 2K",
            "memory against none", "match predictor, 64K against 2K")  # fmt: skip


def page() -> str:
    """Return the page of the older results, of one seed."""
    parts = [
        "# Effect of long context on the loss, with and without a working memory",
        "Made by `python benchmarks/evidence.py --write` of `../scores.csv.xz`. Models of 1 M parameters on "
        "bytes; nats per byte with 95 % intervals over blocks of 1,024 bytes. A positive number is a gain.",
    ]
    for name in kept.names("long_context"):
        record = kept.read(name)
        settings, hardware = record["settings"], "; ".join(record["hardware"].values())
        rows = []
        for case, scores in grouped(record["scores"], lambda one: (*map(one["where"].get, CASE),)).items():
            of = {one["name"]: one for one in scores if one["where"].get("mode", "all") == "all"}
            gains = ("" if gain not in of else f"{of[gain]['value']:+.4f} [{of[gain]['interval']['low']:+.4f}, "
                     f"{of[gain]['interval']['high']:+.4f}]" for gain in GAINS)  # fmt: skip
            rows.append((f"{case[0]} ({of['loss']['n']:,})", *case[1:], of["loss"]["value"], *gains))
        parts += [
            f"## {Path(name).name}",
            f"`{record['command']}`, commit {str(record.get('commit'))[:9]}, {hardware}. Held-out documents: "
            f"{', '.join(Path(text).stem for text in settings['texts'])}; bytes {settings['first']:,} to "
            f"{settings['bytes']:,} of each. Training: {settings['steps']:,} steps of 8 rows of 2,048 bytes.",
            *record["notes"],
            markdown(["bytes", "model", "seed|d", "loss, whole past|.4f", *(f"{one}|>" for one in HEADINGS)], rows),
        ]
    return "\n\n".join(parts) + "\n\n"


def main() -> None:
    parser = parser_of(__doc__, write=False, steps=(STEPS, "fewer for a trial; with --results elsewhere"))
    parser.add_argument("--source", type=Path, required=True, help="folder of the texts, made if it is not there")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="FORM")
    given = arguments(parser)
    if not given.source.exists():
        with whole_folder(given.source) as unfinished:
            write_packages(unfinished)
    texts = digest(given.source)
    if others := {row["texts"] for row in rows_of("past.csv")} - {texts}:
        raise ValueError(f"all lines of past.csv must be of the texts {texts}; it has others of {sorted(others)}.")
    tuning_steps = given.steps * TUNING_STEPS // STEPS

    def planned(form: str, seed: int, rate: float, split: str) -> Planned:
        steps = given.steps if split == "test" else tuning_steps
        return Planned(form, seed, rate, split, given.source, given.out, texts, steps)

    def models() -> Iterator[Planned]:
        rates = {form: tuned(form, tuning_steps) for form in given.only}
        yield from (planned(form, seed, rate, "test") for seed in range(SEEDS) for form, rate in rates.items() if rate)

    rates = [planned(form, 0, rate, "tuning") for form in given.only for rate in RATES]
    Table("past.csv", COLUMNS).work_through([lambda: rates, models], run, given.jobs)
    print(table())


if __name__ == "__main__":
    main()

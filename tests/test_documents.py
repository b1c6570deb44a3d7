"""Links and commands in the documents."""

import re
import shlex
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from gecko.parallel.mesh import MeshSizes
from gecko.recipes import RECIPES, apply_overrides, get_recipe

# ---- Commands in the documents can be run as written.

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src/gecko/cli").glob("*.py"))]
COMMAND = re.compile(r"(?:torchrun (?P<launch>[^\n`]*?) -m )?gecko (?P<verb>train|plan) (?P<arguments>[^\n`]*)")
OVERRIDE = re.compile(r"[a-z_.]+=")


def commands() -> Iterator[tuple[str, str, list[str], int | None]]:
    """Yield document, recipe, overrides and number of ranks (None: not given) of each train and plan command."""
    for path in DOCUMENTS:
        text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
        for command in COMMAND.finditer(text):
            recipe, *rest = shlex.split(command["arguments"], comments=True) or [""]
            if recipe in RECIPES:
                yield path.name, recipe, [it for it in rest if OVERRIDE.match(it)], ranks(command, rest)


def ranks(command: re.Match[str], arguments: list[str]) -> int | None:
    if command["verb"] == "plan":  # finds a mesh for the GPUs, unless the command sets one
        meshed = "--gpus" in arguments and any(it.startswith("parallel.") for it in arguments)
        return int(arguments[arguments.index("--gpus") + 1]) if meshed else None
    if command["launch"] is None:
        return 1
    counts = re.findall(r"--n(?:nodes|proc-per-node)[ =](\d+)", command["launch"])
    return prod(map(int, counts)) if counts else None


@pytest.mark.parametrize(("document", "recipe", "overrides", "world"), commands())
def test_a_recipe_suits_the_ranks_it_is_started_on(
    document: str, recipe: str, overrides: list[str], world: int | None
) -> None:
    run = apply_overrides(get_recipe(recipe), overrides)
    if world is not None:
        parallel = run.parallel
        sizes = MeshSizes.of(world, parallel.replicate, parallel.shard, parallel.context)
        run.rows_per_rank(sizes.data_ranks)


def test_slurm_and_torchrun_leave_a_run_as_long_to_save() -> None:
    """By default torchrun kills its ranks half a minute after a signal."""
    script = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8").partition("```bash")[2].partition("```")[0]
    signalled = re.search(r"--signal=TERM@(\d+)", script)
    options = re.search(r"torchrun (.*)-m gecko", script.replace("\\\n", ""))
    assert signalled is not None and options is not None
    launch, _ = get_args_parser().parse_known_args([*shlex.split(options[1]), "script"])
    assert 0.9 * int(signalled[1]) < launch.shutdown_timeout < int(signalled[1])


# ---- Targets of links in the documents exist.

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FILE = re.compile(r"\b((?:benchmarks|docs|tests|src)/[\w/.-]+\.(?:py|md|h|c|json|html|png|svg|pdf))\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_of_a_page_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    assert [name for name in LINK.findall(text) if not (page.parent / name).exists()] == []
    places = (ROOT, ROOT / "tests")  # CONTRIBUTING names tests by their path within tests/
    assert [name for name in FILE.findall(text) if not any((place / name).exists() for place in places)] == []


def test_pages_are_looked_into():
    assert len(PAGES) > 10 and sum(len(FILE.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 30

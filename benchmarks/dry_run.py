"""Dry runs of large jobs on this machine: the plan's memory beside that of the step's code, seconds, and host memory.

    python benchmarks/dry_run.py --write                       # gecko_7b on 256 GPUs; writes results/dry_run.md
    python benchmarks/dry_run.py --recipes gecko_1b gecko_7b

A separate process runs ``gecko plan RECIPE --verify`` for each recipe. Needs the extra ``kernels``, and no GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from typing import Any

from measuring import load, machine, parser_of, publish

NAME = "dry_run.md"


def dry_run(recipe: str) -> dict[str, Any]:
    """Return the numbers of the command. CalledProcessError if the ranks or the memory do not agree with the plan."""
    command = [sys.executable, "-m", "gecko", "plan", recipe, "--verify", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def row(recipe: str, found: dict[str, Any]) -> str:
    checked = found["dry_run"]
    agreement = checked["agreement"]
    graphs = " and ".join(f"{count} with {depth} blocks" for depth, count in checked["graphs_by_depth"].items())
    cells = (
        f"`{recipe}`", f"{len(checked['ranks'])} of {found['gpus']}", f"{checked['planned_bytes'] / 1e9:.2f}",
        f"{checked['memory_bytes']['total'] / 1e9:.2f}", f"{checked['difference']:+.1%}",
        f"{agreement['collectives']:,}", agreement["groups"], f"{agreement['messages']:,}", graphs,
        f"{checked['seconds']:.0f}", f"{checked['host_bytes'] / 1e9:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["gecko_7b"])
    arguments = parser.parse_args()
    rows = [row(recipe, dry_run(recipe)) for recipe in arguments.recipes]
    page = [
        "# Dry runs without GPUs", "",
        f"{date.today()}, {machine()}. Command: `python benchmarks/dry_run.py "
        f"--recipes {' '.join(arguments.recipes)} --write`. {load()}", "",
        "One training step by `gecko plan RECIPE --verify`, for ranks at the corners of the mesh, on tensors without "
        "numbers. “Planned” is the plan without its reserve. Collectives are those of a rank; they are equal in the "
        "process groups of which several ranks were run. Each send has its receive, or the command fails. Graphs are "
        "counted on a narrow model.", "",
        "| recipe | ranks run | planned, GB | dry run, GB | difference | collectives | groups | sends | "
        "compiled graphs | seconds | host memory, GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|", *rows,
    ]  # fmt: skip
    publish(NAME, page, arguments.write)


if __name__ == "__main__":
    main()

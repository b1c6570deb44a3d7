"""Dry runs of large jobs on this machine: the plan's memory beside that of the step's code, seconds, and host memory.

    python benchmarks/dry_run.py --write                       # gecko_7b on 256 GPUs; writes results/dry_run.md
    python benchmarks/dry_run.py --recipes gecko_1b gecko_7b

A separate process runs ``gecko plan RECIPE --verify`` for each recipe. Needs the extra ``kernels``, and no GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys

from measuring import parsed, parser_of, publish, table


def dry_run(recipe: str) -> tuple[object, ...]:
    """Return the row of a recipe. CalledProcessError if the ranks or the memory do not agree with the plan."""
    command = [sys.executable, "-m", "gecko", "plan", recipe, "--verify", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    checked = found["dry_run"]
    agreement = checked["agreement"]
    graphs = " and ".join(f"{count} with {depth} blocks" for depth, count in checked["graphs_by_depth"].items())
    return (
        f"`{recipe}`", f"{len(checked['ranks'])} of {found['gpus']}", checked["planned_bytes"] / 1e9,
        checked["memory_bytes"]["total"] / 1e9, checked["difference"], agreement["collectives"], agreement["groups"],
        agreement["messages"], graphs, checked["seconds"], checked["host_bytes"] / 1e9,
    )  # fmt: skip


def main() -> None:
    given = parsed(parser_of(__doc__, recipes=(["gecko_7b"], "names of recipes")))
    publish(
        "dry_run.md", given, "Dry runs without GPUs", "",
        "One training step by `gecko plan RECIPE --verify`, for ranks at the corners of the mesh, on tensors without "
        "numbers. “Planned” is the plan without its reserve. Collectives are those of a rank; they are equal in the "
        "process groups of which several ranks were run. Each send has its receive, or the command fails. Graphs are "
        "counted on a narrow model.",
        table(
            ["recipe", "ranks run|>", "planned, GB|.2f", "dry run, GB|.2f", "difference|+.1%", "collectives|,",
             "groups|,", "sends|,", "compiled graphs", "seconds|.0f", "host memory, GB|.2f"],
            map(dry_run, given.recipes),
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()

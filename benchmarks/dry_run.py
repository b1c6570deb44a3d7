"""Dry runs of large jobs on this machine: the plan's memory beside that of the step's code, seconds, and host memory;
and the plan's memory beside what the recorded steps of one H200 needed.

    python benchmarks/dry_run.py --write                       # gecko_7b on 256 GPUs; writes results/dry_run.md
    python benchmarks/dry_run.py --recipes gecko_1b gecko_7b

A separate process runs ``gecko plan RECIPE --verify`` for each recipe. Needs the extra ``kernels``, and no GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from gpu.record import Record
from gpu.training import CAPTURED_STEP, equal_llama
from measuring import RESULTS, parsed, parser_of, publish, table

from gecko.models import LlamaConfig
from gecko.plan import GPUS, Assumptions, make_plan
from gecko.recipes import get_recipe
from gecko.train import ParallelSettings


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


def recorded_steps() -> Iterator[tuple[object, ...]]:
    """Yield the rows of the recorded training steps that ``gecko train`` can make."""
    recipe, alone = get_recipe("gecko_1b"), ParallelSettings(1, 1, 1)
    for row in Record(RESULTS / "nvidia_h200.jsonl.xz").rows("training"):
        model = recipe.model if row["model"] == "gecko-1b" else equal_llama(recipe.model)
        captured = row["form"] == CAPTURED_STEP
        if captured and isinstance(model, LlamaConfig):
            continue
        run = replace(
            recipe, model=model, parallel=alone, batch_size=row["rows"], sequence_length=row["length"],
            gradient_accumulation_steps=1, precision="bfloat16", compile=False, capture=captured,
            activation_checkpointing=row["recomputed"],
        )  # fmt: skip
        plan = make_plan(run, 1, GPUS["h200"], Assumptions())
        peak, measured = plan.total - plan.memory["reserve"], row["memory"]
        size = f"{row['rows']} × {row['length']:,}"
        yield (
            row["model"], row["form"], size, measured / 1e9, peak / 1e9, (peak - measured) / 1e9, plan.total / 1e9,
            plan.total / measured - 1,
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
        "The plan of steps that were [recorded on one H200](nvidia_h200.md), and the most memory that PyTorch's "
        "allocator had given out in them. Recorded rows are one document; those of a plan hold several, for which a "
        "Llama keeps a mask.",
        table(
            ["model", "form", "rows × tokens", "measured, GB|.2f", "planned without reserve, GB|.2f",
             "difference, GB|+.2f", "planned with reserve, GB|.2f", "above measured|+.1%"],
            recorded_steps(),
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""The results in Markdown."""

from __future__ import annotations

from gpu.activations import Activations
from gpu.targets import Results, Target, targets
from gpu.timing import Bench
from gpu.training import Training

OPEN = "not measured: no GPU at hand"


def open_targets(command: str) -> list[str]:
    """The page of a machine without a GPU."""
    return [
        "# GPU", "",
        "No GPU was at hand when this was written: **none of the targets below has been measured, and all of them are "
        "open.** The kernels pass the operators' laws under Triton's interpreter and compile for sm_80, sm_90 and "
        "sm_100 without spills (`make test`), which says nothing about their speed.", "",
        "| what, on an H200-class card, bf16, D = 4096, N = 16, 32,768 tokens | target | measured |", "|---|---:|---|",
        *(f"| {target.what} | {_goal(target)} | {OPEN} |" for target in targets()), "",
        f"`{command}` on a machine with a GPU measures them, and writes a page named after the card.",
    ]  # fmt: skip


def page(results: Results, bench: Bench, hardware: str, command: str) -> list[str]:
    """All tables of one run."""
    rates, dtype = results.rates, str(bench.dtype).removeprefix("torch.")
    return [
        f"# {hardware.partition(';')[0]}", "", f"{hardware}.", "",
        f"{dtype}, medians of {bench.repeats} calls after {bench.warm_ups}, fewer where calls are long; on a GPU, "
        "operators without the time that the host takes to launch them. In the same run a large copy moves "
        f"{rates.copy / 1e9:,.0f} GB/s, and a large product makes {rates.products / 1e12:,.2f} TFLOP/s; the peak that "
        f"MFU is counted by is {results.peak / 1e12:,.2f}.", "",
        *_targets(results), *_operators(results), *_activations(results), *_trainings(results), *_positions(results),
        f"Written by `{command}`.",
    ]  # fmt: skip


def _goal(target: Target) -> str:
    sign = "≤" if target.at_most else "≥"
    return f"{sign} {target.least:.0%} {target.unit}" if target.least < 1 else f"{sign} {target.least:g} {target.unit}"


def _targets(results: Results) -> list[str]:
    lines = ["## Targets", "", "| what | target | measured | |", "|---|---:|---:|---|"]
    for target in targets():
        value = target.find(results)
        found = "not measured" if value is None else f"{value:.0%}" if target.least < 1 else f"{value:.2f}"
        verdict = "" if value is None else "met" if target.met(value) else "missed"
        lines.append(f"| {target.what} | {_goal(target)} | {found} | {verdict} |")
    return [*lines, ""]


def _operators(results: Results) -> list[str]:
    lines = [
        "## Operators", "",
        "Bytes: each input and each output once, with gradients in backward. FLOPs: those of the equations, two for a "
        "multiplication and addition, three times as many with backward. Shares are of the copy and the product above.",
        "", "| operator | form | shape | forward, ms | with backward, ms | MB | GFLOP | copy bandwidth | matrix rate |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for timing in results.timings:
        start = f"| {timing.operator} | {timing.form} | {timing.shape}"
        if timing.forward is None or timing.both is None:
            lines.append(f"{start} | {timing.reason} | | | | | |")
            continue
        shares = [
            f"{kind(timing, False) or 0:.1%} / {kind(timing, True) or 0:.1%}"
            for kind in (results.bandwidth, results.products)
        ]
        floor, size = timing.floor, results.element_size
        lines.append(
            f"{start} | {1e3 * timing.forward:.3f} | {1e3 * timing.both:.3f} "
            f"| {floor.numbers_forward * size / 1e6:,.1f} / {floor.numbers_both * size / 1e6:,.1f} "
            f"| {floor.flops_forward / 1e9:,.1f} / {floor.flops_both / 1e9:,.1f} | {shares[0]} | {shares[1]} |"
        )
    return [*lines, ""]


def _activations(results: Results) -> list[str]:
    return [
        "## What a block keeps for backward", "",
        "Against the inputs and outputs of its linear layers, of attention and of the memory, each tensor once.", "",
        "| block of | tokens | kept, MB | read and written by products, MB | ratio |", "|---|---:|---:|---:|---:|",
        *(_activation(found) for found in results.activations), "",
    ]  # fmt: skip


def _activation(found: Activations) -> str:
    return (
        f"| {found.model} | {found.length:,} | {found.kept / 1e6:,.1f} | {found.needed / 1e6:,.1f} "
        f"| {found.kept / found.needed:.2f} |"
    )


def _trainings(results: Results) -> list[str]:
    return [
        "## Training, one row a step", "",
        "| model | parameters | tokens | recomputed | tokens/s | MFU | of the measured matrix rate | peak memory, GB |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
        *(_training(training, results) for training in results.trainings), "",
    ]  # fmt: skip


def _training(training: Training, results: Results) -> str:
    start = f"| {training.model} | {training.parameters / 1e6:,.1f} M | {training.length:,} | {training.checkpointing}"
    if training.speed is None:
        return f"{start} | | | | |"
    shares = [training.utilisation(rate) or 0 for rate in (results.peak, results.rates.products)]
    memory = "" if training.peak is None else f"{training.peak / 1e9:.1f}"
    return f"{start} | {training.speed:,.0f} | {shares[0]:.1%} | {shares[1]:.1%} | {memory} |"


def _positions(results: Results) -> list[str]:
    return [
        "## Reading and decoding, one text", "",
        "| model | position | tokens/s read so far | ms a token decoded there |", "|---|---:|---:|---:|",
        *(f"| {p.model} | {p.position:,} | {p.prefill:,.0f} | {1e3 * p.decode:.3f} |" for p in results.positions), "",
    ]  # fmt: skip

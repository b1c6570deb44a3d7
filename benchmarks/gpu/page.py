"""The results in Markdown."""

from __future__ import annotations

import torch
from gpu.activations import Activations
from gpu.decoding import Decoding
from gpu.kernel_page import kernel_sections
from gpu.operators import Agreement, Timing
from gpu.reading import Position
from gpu.record import Record
from gpu.targets import SHAPE, Results, Target, targets
from gpu.timing import Rates
from gpu.training import Training

LIMITS = {"bfloat16": 2e-2, "float32": 1e-3}
"""Limits of the difference between a kernel and the eager form, both of which round."""
OPEN = "not measured: no GPU at hand"


def open_targets(command: str) -> list[str]:
    """Return the page of a machine without a GPU."""
    return [
        "# GPU", "",
        "No GPU was at hand when this was written: **none of the targets below has been measured, and all of them are "
        "open.** The kernels pass the operators' laws under Triton's interpreter and compile for sm_80, sm_90 and "
        "sm_100 without spills (`make test`), which says nothing about their speed.", "",
        "| what, on an H200-class card, bf16, D = 4096, N = 16, 32,768 tokens | target | measured |", "|---|---:|---|",
        *(f"| {target.what} | {_goal(target)} | {OPEN} |" for target in targets()), "",
        f"`{command}` on a machine with a GPU measures them, and writes a page named after the card.",
    ]  # fmt: skip


def page(record: Record) -> list[str]:
    """Return all tables of one card."""
    results, dtype = _results(record), record.fact("dtype")
    hardware = record.fact("hardware")
    commands = ", ".join(f"`{command}`" for command in record.fact("commands"))
    return [
        f"# {hardware.partition(';')[0]}", "", f"{hardware}.", "",
        f"{dtype}, medians of {record.fact('repeats')} calls after {record.fact('warm_ups')}, fewer where calls are "
        "long; on a GPU, operators without the time that the host takes to launch them. " + _rates(results.rates), "",
        *_warning(results, dtype), *_targets(results), *_operators(results, dtype), *_activations(results),
        *_trainings(results), *_positions(results), *_decodings(results),
        *kernel_sections(record, results.rates), *_parts(record), f"Written by {commands}.",
    ]  # fmt: skip


def _results(record: Record) -> Results:
    return Results(
        next(record.results(Rates), None), getattr(torch, record.fact("dtype")).itemsize,
        list(record.results(Timing)), list(record.results(Agreement)), list(record.results(Activations)),
        list(record.results(Training)), list(record.results(Position)), list(record.results(Decoding)),
    )  # fmt: skip


def _rates(rates: Rates | None) -> str:
    if rates is None:
        return "What a large copy and a large product reach was not measured."
    return (
        f"A large copy moves {rates.copy / 1e9:,.0f} GB/s, and a large product makes {rates.products / 1e12:,.2f} "
        f"TFLOP/s; the peak that MFU is counted by is {rates.peak / 1e12:,.2f}."
    )


def _warning(results: Results, dtype: str) -> list[str]:
    """Return a warning about wrong kernels, whose times are meaningless."""
    wrong = [f"{a.operator} ({a.shape})" for a in results.agreements if _differs(a, dtype)]
    return [f"**Not what the eager form computes: {', '.join(wrong)}. Their times mean nothing.**", ""] if wrong else []


def _differs(agreement: Agreement, dtype: str) -> bool:
    found = (agreement.outputs, agreement.gradients)
    return any(difference is not None and not difference <= LIMITS[dtype] for difference in found)


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


def _operators(results: Results, dtype: str) -> list[str]:
    return [
        "## Operators", "",
        "Forward, and forward with backward. Host: until it has launched all kernels, and host-bound where that takes "
        "longer than the card's work. Difference: ‖kernel − eager‖ / ‖eager‖ of outputs and of gradients, the largest "
        f"of each; above {LIMITS[dtype]:g} it is WRONG. The eager form is timed at {SHAPE} only. MB: each "
        "input and output once, with gradients in backward. GFLOP: those of the equations, two for a product and an "
        "addition, three times as many with backward. Shares are of the copy and the product above.", "",
        "| operator | form | shape | card, ms | host, ms | difference | MB | GFLOP | copy bandwidth | matrix rate |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *(_timing(timing, results, dtype) for timing in results.timings), "",
    ]  # fmt: skip


def _timing(timing: Timing, results: Results, dtype: str) -> str:
    start = f"| {timing.operator} | {timing.form} | {timing.shape}"
    if timing.forward is None or timing.both is None:
        return f"{start} | {timing.reason} | | | | | | |"
    floor, size = timing.floor, results.element_size
    host = f"{1e3 * timing.launching_forward:.3f} / {1e3 * timing.launching_both:.3f}"
    shares = [
        f"{kind(timing, False) or 0:.1%} / {kind(timing, True) or 0:.1%}"
        for kind in (results.bandwidth, results.products)
    ]
    return (
        f"{start} | {1e3 * timing.forward:.3f} / {1e3 * timing.both:.3f} "
        f"| {host}{' **host-bound**' if timing.host_bound else ''} | {_agreement(results.agreement(timing), dtype)} "
        f"| {floor.numbers_forward * size / 1e6:,.1f} / {floor.numbers_both * size / 1e6:,.1f} "
        f"| {floor.flops_forward / 1e9:,.1f} / {floor.flops_both / 1e9:,.1f} | {shares[0]} | {shares[1]} |"
    )


def _agreement(agreement: Agreement | None, dtype: str) -> str:
    if agreement is None or agreement.outputs is None or agreement.gradients is None:
        return "" if agreement is None else f"not compared: {agreement.reason}"
    found = f"{agreement.outputs:.1e} / {agreement.gradients:.1e}"
    return f"**WRONG** {found}" if _differs(agreement, dtype) else found


def _activations(results: Results) -> list[str]:
    return [
        "## Activations kept for the backward pass", "",
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
    rates = results.rates
    shares = ["", ""] if rates is None else [f"{training.utilisation(r):.1%}" for r in (rates.peak, rates.products)]
    memory = "" if training.peak is None else f"{training.peak / 1e9:.1f}"
    return f"{start} | {training.speed:,.0f} | {shares[0]} | {shares[1]} | {memory} |"


def _positions(results: Results) -> list[str]:
    return [
        "## Reading and decoding, one text", "",
        "| model | position | tokens/s read so far | ms a token decoded there | of which the host launches, ms |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {p.model} | {p.position:,} | {p.prefill:,.0f} | {1e3 * p.decode:.3f} | {1e3 * p.launching:.3f} |"
            for p in results.positions
        ), "",
    ]  # fmt: skip


def _decodings(results: Results) -> list[str]:
    return [
        "## Decoding rows side by side", "",
        "Byte limit: weights, and what a token reads of the states, over the bandwidth of the copy.", "",
        "| model | rows | form | ms a step | of which the host launches, ms | tokens/s | GB read | of the byte limit |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
        *(_decoding(decoding, results) for decoding in results.decodings), "",
    ]  # fmt: skip


def _decoding(decoding: Decoding, results: Results) -> str:
    share = results.byte_limit(decoding)
    return (
        f"| {decoding.model} | {decoding.rows} | {decoding.form} | {1e3 * decoding.seconds:.3f} "
        f"| {1e3 * decoding.launching:.3f} | {decoding.rows / decoding.seconds:,.0f} "
        f"| {decoding.bytes_read / 1e9:.2f} | {'' if share is None else f'{share:.0%}'} |"
    )


def _parts(record: Record) -> list[str]:
    """Return a table of how each part ended, and which of its tasks failed."""
    lines = ["## Parts", "", "Each was measured in a process of its own.", "", "| part | |", "|---|---|"]
    for part, ending in record.parts().items():
        failed = [f"{name}: {reason}" for name, reason in record.tasks(part).items() if reason]
        left = [f"{'what was left' if record.tasks(part) else 'not measured'}: {ending}"] if ending else []
        lines.append(f"| {part} | {_cell('; '.join([*failed, *left])) or 'measured'} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "/")

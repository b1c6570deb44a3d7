"""The results in Markdown."""

from __future__ import annotations

from typing import Any

import torch
from gpu.decoding import Decoding
from gpu.kernel_page import kernel_sections
from gpu.operators import FACTOR, ROUNDING, Agreement, Timing
from gpu.record import TODAY, Ended, Noted, Record, Tried
from gpu.targets import Results, Target, targets
from gpu.timing import Rates
from gpu.training import Training
from gpu.winners import AHEAD, won


def page(record: Record) -> list[str]:
    """Return all tables of one card."""
    facts = record.facts()
    results, dtype, hardware = _results(record, facts), facts["dtype"], facts["hardware"]
    commands = ", ".join(f"`{command}`" for command in facts["commands"])
    return [
        f"# {hardware.partition(';')[0]}", "", f"{hardware}.", "",
        f"{dtype}, medians of {facts['repeats']} calls after {facts['warm_ups']}, fewer where calls are "
        "long; on a GPU, operators without the time that the host takes to launch them. " + _rates(results.rates), "",
        *_warning(results, dtype), *_targets(results), *_operators(results, dtype), *_trainings(results),
        *_decodings(results), *_tried(list(record.results(Tried)), dtype), *_noted(list(record.results(Noted))),
        *kernel_sections(record, results.rates), *_items(record.all_ended()), f"Written by {commands}.",
    ]  # fmt: skip


def _results(record: Record, facts: dict[str, Any]) -> Results:
    kinds = (Timing, Agreement, Training, Decoding)
    return Results(
        next(record.results(Rates), None), getattr(torch, facts["dtype"]).itemsize,
        *(list(record.results(kind)) for kind in kinds),
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
    wrong = [f"{a.operator} ({a.shape})" for a in results.agreements if a.is_wrong(dtype)]
    return [f"**Not what the eager form computes: {', '.join(wrong)}. Their times mean nothing.**", ""] if wrong else []


def _goal(target: Target) -> str:
    return f"≥ {target.least:.0%} {target.unit}" if target.least < 1 else f"≥ {target.least:g} {target.unit}"


def _targets(results: Results) -> list[str]:
    lines = ["## Targets", "", "| what | target | measured | |", "|---|---:|---:|---|"]
    for target in targets(results):
        value, form = target.value, ".0%" if target.least < 1 else ".2f"
        found = "not measured" if value is None else f"{value:{form}}"
        verdict = "" if value is None else "met" if value >= target.least else "missed"
        lines.append(f"| {target.what} | {_goal(target)} | {found} | {verdict} |")
    return [*lines, ""]


def _operators(results: Results, dtype: str) -> list[str]:
    return [
        "## Operators", "",
        "Forward, and forward with backward. Host: until it has launched all kernels, and host-bound where that takes "
        "longer than the card's work. Difference: ‖y − exact‖ / ‖exact‖ of outputs and of gradients, the largest of "
        "each, from the eager form in float64; in brackets, that of the eager form in the dtype of the kernels. More "
        f"than {FACTOR:g} times as much, and than {ROUNDING[dtype]:.1g}, is WRONG. MB: each input and output once, "
        "with gradients in backward. GFLOP: those of the equations, two for a product and an addition, three times as "
        "many with backward. Shares are of the copy and the product above.", "",
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
    if agreement.eager_outputs is None or agreement.eager_gradients is None:
        return f"{found} (from the eager form in {dtype})"
    found += f" ({agreement.eager_outputs:.1e} / {agreement.eager_gradients:.1e})"
    return f"**WRONG** {found}" if agreement.is_wrong(dtype) else found


def _trainings(results: Results) -> list[str]:
    return [
        "## Training", "",
        "| model | parameters | rows × tokens | recomputed | tokens/s | MFU | of the measured matrix rate | peak, GB |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
        *(_training(training, results) for training in results.trainings), "",
    ]  # fmt: skip


def _training(training: Training, results: Results) -> str:
    name = f"{training.model}, {training.form}" if training.form else training.model
    size = f"{training.parameters / 1e6:,.1f} M | {training.rows} × {training.length:,}"
    start = f"| {name} | {size} | {training.checkpointing}"
    if training.speed is None:
        return f"{start} | | | | |"
    rates = results.rates
    shares = ["", ""] if rates is None else [f"{training.utilisation(r):.1%}" for r in (rates.peak, rates.products)]
    memory = "" if training.peak is None else f"{training.peak / 1e9:.1f}"
    return f"{start} | {training.speed:,.0f} | {shares[0]} | {shares[1]} | {memory} |"


def _decodings(results: Results) -> list[str]:
    return [
        "## Decoding rows side by side", "",
        "Byte limit: weights, and what a token reads and writes of the states, over the bandwidth of the copy.", "",
        "| model | rows | form | ms a step | of which the host launches, ms | tokens/s | GB | of the byte limit |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
        *(_decoding(decoding, results) for decoding in results.decodings), "",
    ]  # fmt: skip


def _decoding(decoding: Decoding, results: Results) -> str:
    share = results.byte_limit(decoding)
    form = f"{decoding.form}, {decoding.variant}" if decoding.variant else decoding.form
    return (
        f"| {decoding.model} | {decoding.rows} | {form} | {1e3 * decoding.seconds:.3f} "
        f"| {1e3 * decoding.launching:.3f} | {decoding.rows / decoding.seconds:,.0f} "
        f"| {decoding.bytes_moved / 1e9:.2f} | {'' if share is None else f'{share:.0%}'} |"
    )


def _tried(found: list[Tried], dtype: str) -> list[str]:
    if not found:
        return []
    winners = [str(x) for x in won(found, dtype)]
    return [
        "## Variants of kernels", "",
        "Forward and backward of the operator. A variant wins that is not WRONG and takes "
        f"{1 - AHEAD:.0%} less time than the chosen form, the fastest one of its family.", "",
        "| operator | family | variant | ms | of today | difference | |", "|---|---|---|---:|---:|---|---|",
        *(_trial(x, found, winners, dtype) for x in found), "",
    ]  # fmt: skip


def _trial(x: Tried, found: list[Tried], winners: list[str], dtype: str) -> str:
    start = f"| {x.operator} | {x.family} | {x.variant}"
    if x.seconds is None:
        return f"{start} | | | {_cell(x.reason)} | |"
    now = next((y.seconds for y in found if (y.family, y.variant) == (x.family, TODAY)), None)
    share = "" if now is None else f"{x.seconds / now:.0%}"
    verdict = "**wins**" if f"{x.family}: {x.variant}" in winners else ""
    return f"{start} | {1e3 * x.seconds:.3f} | {share} | {_agreement(x.agreement, dtype)} | {verdict} |"


def _noted(found: list[Noted]) -> list[str]:
    if not found:
        return []
    return ["## Other numbers", "", "| what | | |", "|---|---:|---|",
            *(f"| {_cell(x.name)} | {x.value:,.6g} | {x.unit} |" for x in found), ""]  # fmt: skip


def _items(found: list[Ended]) -> list[str]:
    """Return a table of how each item ended. Kernels that were compiled meanwhile make its first call slow."""
    return ["## Items", "", "| item | seconds | kernels compiled | |", "|---|---:|---:|---|",
            *(f"| {x.item} | {x.seconds:,.1f} | {x.compiled} | {_cell(x.reason) or 'measured'} |" for x in found),
            ""]  # fmt: skip


def _cell(text: str) -> str:
    return text.replace("|", "/")

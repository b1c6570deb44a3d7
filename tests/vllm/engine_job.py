"""Engine in a process of its own, with workers: reads settings and prompts as JSON, writes the new tokens as JSON, and
how many requests were preempted if statistics are on. With TRITON_INTERPRET=1 it decodes as on a GPU: by the Triton
decoder, and the host may not read what would be there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm import LLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.vllm_texts import greedy, metric

ON_GPU: dict[int, Any] = {}
"""Storages of what would be on a GPU, by address. They are kept, so that none gets the address of another one."""
RUNNING: list[None] = []
"""An item for each call of the plug-in that runs."""


def put(x: Any) -> Any:
    """Say that ``x``, if it is a tensor, would be on a GPU."""
    if isinstance(x, Tensor):
        ON_GPU[x.untyped_storage().data_ptr()] = x.untyped_storage()
    return x


def refused(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a tensor, which the host may not call while the plug-in runs."""

    def run(x: Tensor, *arguments: Any) -> Any:
        assert not (RUNNING and x.untyped_storage().data_ptr() in ON_GPU), "the host waits for the GPU"
        return read(x, *arguments)

    return run


def watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of the plug-in, whose tensors would be on a GPU."""

    def run(*arguments: Any, **named: Any) -> Any:
        for x in (*arguments, *named.values()):
            put(x)
        RUNNING.append(None)
        try:
            return call(*arguments, **named)
        finally:
            RUNNING.pop()

    return run


def with_bool_mask(access: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a load or store of Triton 3.9's interpreter with the mask that it wants, which is bool."""

    def run(builder: Any, *arguments: Any) -> Any:
        arguments[place].data = arguments[place].data.astype(bool)
        return access(builder, *arguments)

    return run


def decode_as_on_a_gpu() -> None:
    from triton.runtime.interpreter import InterpreterBuilder as Interpreter

    from gecko.vllm import model, pages

    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__array__"):
        setattr(Tensor, name, refused(getattr(Tensor, name)))
    for owner, name in (
        (model.GeckoForCausalLM, "forward"), (model.GeckoForCausalLM, "_decode"), (pages.StepMetadataBuilder, "build"),
    ):  # fmt: skip
        setattr(owner, name, watched(getattr(owner, name)))
    table = pages.mamba_get_block_table_tensor
    pages.mamba_get_block_table_tensor = lambda *arguments: put(table(*arguments))
    model.decoder_of = lambda *_: "triton"
    Interpreter.create_masked_load = with_bool_mask(Interpreter.create_masked_load, 1)
    Interpreter.create_masked_store = with_bool_mask(Interpreter.create_masked_store, 2)


def main() -> None:
    job = json.load(sys.stdin)
    if os.environ.get("TRITON_INTERPRET") == "1":
        decode_as_on_a_gpu()
    engine = LLM(**job["settings"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    found = engine.generate(prompts, [greedy(new) for new in job["new"]], use_tqdm=False)
    counted = job["settings"].get("disable_log_stats", True) or metric(engine, "num_preemptions")
    print("RESULT" + json.dumps([[list(one.outputs[0].token_ids) for one in found], counted]))


if __name__ == "__main__":
    main()

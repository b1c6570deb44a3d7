"""Prompts, and the tokens that ``gecko.generate`` gives for each of them alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams

import gecko


def prompt(length: int, seed: int = 0) -> Tensor:
    """Return random bytes, (length,)."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


def expected(model: gecko.Gecko, text: Tensor, new: int) -> list[int]:
    """Return the greedy continuation."""
    return gecko.generate(model, text, max_new_tokens=new, temperature=0).tokens[0]


def greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


def continued(engine: LLM, texts: Sequence[Tensor], parameters: Any) -> list[list[int]]:
    """Return the new tokens of each text; all are submitted at once."""
    prompts = [{"prompt_token_ids": text.tolist()} for text in texts]
    return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, parameters, use_tqdm=False)]


def metric(engine: LLM, name: str) -> int:
    """Return a counter of vLLM, summed over engines."""
    return sum(int(one.value) for one in engine.get_metrics() if one.name == f"vllm:{name}")

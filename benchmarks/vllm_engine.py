"""Gecko in vLLM: tokens/s of many requests, beside a Mamba2 and a Llama of equal size in vLLM, and beside our engine.

    .venv-vllm/bin/python benchmarks/vllm_engine.py --write

All weights are random. The file is not named vllm.py, because ``import vllm`` would then find it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

import torch
from measuring import in_turns, parsed, parser_of, publish, seconds_of, size_of, table
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

import gecko
from gecko.inference import Sampling
from gecko.inference.request import Request
from gecko.inference.scheduler import Engine

CONTENDERS = {
    "gecko-engine": "Gecko, our engine (`gecko serve`)", "gecko": "Gecko, vLLM", "mamba2": "Mamba2, vLLM",
    "llama": "Llama, vLLM",
}  # fmt: skip
"""Models, each in a process of its own: what is measured, by the name on the command line."""


def write_models(folder: Path, preset: str) -> dict[str, int]:
    """Write a random Gecko, and a Llama and a Mamba2 of about its size; return their numbers of parameters."""
    torch.manual_seed(0)
    config = gecko.GeckoConfig.preset(preset)
    model = gecko.Gecko(config)
    model.save(folder / "gecko")
    count = size_of(model)
    width, vocabulary = config.model_dim, config.vocab_size
    sizes = {"gecko": count}
    for name, build in (("llama", _llama), ("mamba2", _mamba2)):
        one, two = (size_of(build(width, vocabulary, layers)) for layers in (1, 2))
        other = build(width, vocabulary, max(1, round((count - 2 * vocabulary * width) / (two - one))))
        other.save_pretrained(folder / name)
        sizes[name] = size_of(other)
    return sizes


def _llama(width: int, vocabulary: int, layers: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        max_position_embeddings=8192,
    ))  # fmt: skip


def _mamba2(width: int, vocabulary: int, layers: int) -> Any:
    return Mamba2ForCausalLM(Mamba2Config(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_heads=2 * width // 64, head_dim=64,
        state_size=128, expand=2, n_groups=1, tie_word_embeddings=False,
    ))  # fmt: skip


def in_process(arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """Measure one model in a separate process; all models get the same number of threads."""
    options = ["--one", name, "--folder", arguments.folder]
    for option in ("threads", "requests", "prompt", "new", "dtype", "rows"):
        options += [f"--{option}", str(getattr(arguments, option))]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{(done.stdout + done.stderr)[-5000:]}")
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(result.removeprefix("RESULT"))


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of reading all prompts for one token each, and of generating ``new`` tokens for each."""
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (arguments.prompt,), generator=generator) for _ in range(arguments.requests)]
    run = _our_engine(arguments) if arguments.one == "gecko-engine" else _vllm_engine(arguments)
    run(prompts[:2], 4)  # the first calls of a process are slower

    def work(new: int) -> None:
        assert run(prompts, new) == len(prompts) * new, "every request gets all of its tokens"

    return {name: seconds_of(partial(work, new)) for name, new in (("read", 1), ("all", arguments.new))}


def _our_engine(arguments: argparse.Namespace) -> Callable[[list[torch.Tensor], int], int]:
    model = gecko.load(Path(arguments.folder) / "gecko").to(getattr(torch, arguments.dtype))
    engine = Engine(model, rows=arguments.rows)

    def run(prompts: list[torch.Tensor], new: int) -> int:
        before = engine.tokens_made
        for prompt in prompts:
            engine.submit(Request(prompt, new, Sampling(0.0)))
        while not engine.idle:
            engine.step()
        return engine.tokens_made - before

    return run


def _vllm_engine(arguments: argparse.Namespace) -> Callable[[list[torch.Tensor], int], int]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(Path(arguments.folder) / arguments.one), dtype=arguments.dtype, enforce_eager=True,
        skip_tokenizer_init=True, max_model_len=arguments.prompt + arguments.new, max_num_seqs=arguments.rows,
        max_num_batched_tokens=2048, enable_prefix_caching=False,
    )  # fmt: skip

    def run(prompts: list[torch.Tensor], new: int) -> int:
        parameters = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        answers = engine.generate(inputs, parameters, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return run


def main() -> None:
    parser = parser_of(
        __doc__, threads=True, preset=("gecko-15m", "architecture of the Gecko"), requests=(16, "at once"),
        prompt=(128, "tokens of each prompt"), new=(32, "tokens generated for each"),
        rows=(16, "most requests side by side"), rounds=(3, "in turns"),
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parsed(parser)
    if given.one:
        print("RESULT" + json.dumps(measure(given)))
        return
    with tempfile.TemporaryDirectory() as given.folder:
        sizes = write_models(Path(given.folder), given.preset)
        # In turns, so that a busy minute does not hit one of them only.
        found = in_turns({name: partial(in_process, given, name) for name in CONTENDERS}, given.rounds)
    given.folder = None
    read, made = given.requests * given.prompt, given.requests * (given.new - 1)
    rows = [
        (title, sizes[name.removesuffix("-engine")], read / statistics.median(one["read"] for one in found[name]),
         made / statistics.median(one["all"] - one["read"] for one in found[name]))
        for name, title in CONTENDERS.items()
    ]  # fmt: skip
    publish(
        "vllm_engine.md", given, "Gecko in vLLM",
        f"vLLM {version('vllm-cpu')}, {given.dtype}, {given.threads} threads, random weights, eager. {given.requests} "
        f"requests at once, {given.rows} side by side: prompts of {given.prompt} tokens, {given.new} new tokens, "
        f"greedy, no prefix cache. Medians of {given.rounds} rounds in turns.",
        table(["", "parameters|,", "prompt, tokens/s|,.0f", "generation, tokens/s|,.0f"], rows),
        "Prompt: time until every request has its first token. Generation: the additional time of the other tokens.",
    )  # fmt: skip


if __name__ == "__main__":
    main()

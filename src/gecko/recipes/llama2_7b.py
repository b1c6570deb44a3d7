"""Llama2-7B, the paper's baseline, on the rows that Gecko-7B is trained on. Set ``data.source`` and ``data.tokenizer``.

Rows are of 32K, so the rotary base is 500,000, that of Gecko-7B and of Llama 2 Long (Xiong et al., 2023), which is the
paper's Llama of such a context. Ranks cannot share a row, because its attention needs all keys, so 128 rows keep 128
GPUs busy. The Llama 2 that the paper compares with has rows of 4K and a base of 10,000:
``sequence_length=4096 batch_size=1024 model.rope_base=10000 parallel.replicate=32``, on 256 GPUs.
"""

from __future__ import annotations

import dataclasses

from gecko.baselines import LlamaConfig
from gecko.recipes.gecko_7b import gecko_7b
from gecko.train import ParallelSettings, Run


def llama2_7b() -> Run:
    return dataclasses.replace(
        gecko_7b(),
        model=LlamaConfig.preset("llama2-7b", rope_base=500_000.0),
        output="runs/llama2_7b",
        parallel=ParallelSettings(replicate=16, shard=8),
    )

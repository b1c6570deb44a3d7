"""Engine in a process of its own, with workers: reads settings and prompts as JSON, writes the new tokens as JSON."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.load(sys.stdin)
    engine = LLM(**job["settings"])
    parameters = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
    found = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], parameters, use_tqdm=False)
    print("RESULT" + json.dumps([list(one.outputs[0].token_ids) for one in found]))


if __name__ == "__main__":
    main()

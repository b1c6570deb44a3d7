"""Fine-tune a model on chats, and talk with the result.

    python examples/finetune_on_chats.py MODEL CHATS RUN [KEY=VALUE ...]

CHATS is JSON Lines: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}.
"""

import sys
from pathlib import Path

import gecko
from gecko.data import load_tokenizer
from gecko.data.chat import find_format
from gecko.inference import Sampling
from gecko.inference.chat import Conversation
from gecko.recipes.finetune import finetuning_run
from gecko.train import train


def main(model_folder: str, chats: str, run_folder: str, *settings: str) -> None:
    # lora_rank=16 trains adapters instead of all parameters, which needs less memory.
    run = finetuning_run(model_folder, chats, output=run_folder, tokenizer="bytes", overrides=settings)
    checkpoint = train(run, resume=True).checkpoint

    tokenizer = load_tokenizer("bytes")
    conversation = Conversation(gecko.load(checkpoint).eval(), tokenizer, find_format(tokenizer, checkpoint))
    for question in (run.sample.prompt, "Are you sure?"):
        answer = conversation.ask(question, sampling=Sampling(temperature=0.7), seed=1, max_new_tokens=100)
        print(f"you> {question}\nmodel> {''.join(answer)}")
    # The whole conversation is a state of constant size.
    conversation.save(Path(run_folder) / "talk.state")


if __name__ == "__main__":
    main(*sys.argv[1:])

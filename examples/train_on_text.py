"""Train a small model on one text file, and print what it has learned.

    python examples/train_on_text.py TEXT RUN [KEY=VALUE ...]

The last twentieth of the text is held out. `minutes=10` trains longer; `gecko train tiny --show` lists all settings.
"""

import sys

from gecko.recipes import apply_overrides, get_recipe
from gecko.train import train


def main(text: str, run_folder: str, *settings: str) -> None:
    run = apply_overrides(get_recipe("tiny"), [f"data.source={text}", f"output={run_folder}", "minutes=3", *settings])
    result = train(run, resume=True)  # the same command continues after Ctrl-C
    if result.evaluation is not None:
        print(f"held-out loss: {result.evaluation.nats_per_byte:.3f} nats per byte")


if __name__ == "__main__":
    main(*sys.argv[1:])

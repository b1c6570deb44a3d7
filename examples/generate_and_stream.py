"""Continue a prompt: all at once with two seeds, and then piece by piece as the text is generated.

python examples/generate_and_stream.py MODEL PROMPT [TOKENS]
"""

import sys

import gecko
from gecko.data import document_ids, load_tokenizer
from gecko.inference import TextStream


def main(model_folder: str, prompt: str, tokens: str = "100") -> None:
    model = gecko.load(model_folder).eval()  # a model folder, or a run: its newest checkpoint
    tokenizer = load_tokenizer("bytes")
    ids = document_ids(tokenizer, prompt)

    two = gecko.generate(model, [ids, ids], max_new_tokens=int(tokens), temperature=0.8, seed=[1, 2])
    for number, row in enumerate(two.tokens, start=1):
        print(f"{number}: {tokenizer.decode(row)!r}")

    stream = gecko.stream(model, ids, max_new_tokens=int(tokens), temperature=0.8, seed=3)
    print(prompt, end="")
    for piece in TextStream(stream, tokenizer, goes_on=True):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])

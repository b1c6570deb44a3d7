"""Read a long book once, save the state of constant size, and continue from it any number of times.

python examples/state_of_a_book.py MODEL BOOK [STATE]
"""

import sys
from pathlib import Path

import torch

import gecko
from gecko.data import load_tokenizer
from gecko.inference import encode_stream, read


def main(model_folder: str, book: str, state_file: str = "book.state") -> None:
    model = gecko.load(model_folder).eval()
    tokenizer = load_tokenizer("bytes")

    with Path(book).open("rb") as file:  # the book is never in memory as a whole
        pieces = iter(lambda: file.read(1 << 16), b"")
        start = torch.tensor([tokenizer.document_start])
        after = read(model, [start, *encode_stream(tokenizer, pieces, book)]).state
    after.save(state_file)
    print(f"read {after.position[0]:,} tokens; {state_file} has {Path(state_file).stat().st_size:,} bytes")

    state = gecko.GeckoState.load(state_file)  # in another program, without the book
    for question in ("\n\nIn short, ", "\n\nThe end of the story is that "):
        answer = gecko.generate(model, tokenizer.encode(question), state=state, max_new_tokens=60, seed=1)
        print(repr(question + tokenizer.decode(answer.tokens[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])

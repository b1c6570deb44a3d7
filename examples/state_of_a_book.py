"""Read a long book once, save the state of constant size, and continue from it any number of times.

python examples/state_of_a_book.py MODEL BOOK [STATE]
"""

import sys
from pathlib import Path

import gecko
from gecko.data import document_ids, document_stream, load_tokenizer
from gecko.inference import read


def main(model_folder: str, book: str, state_file: str = "book.state") -> None:
    model = gecko.load(model_folder).eval()
    tokenizer = load_tokenizer("bytes")

    with Path(book).open("rb") as file:  # the book is never in memory as a whole
        pieces = iter(lambda: file.read(1 << 16), b"")
        after = read(model, document_stream(tokenizer, pieces, book)).state
    after.save(state_file)
    print(f"read {after.position[0]:,} tokens; {state_file} has {Path(state_file).stat().st_size:,} bytes")

    state = gecko.GeckoState.load(state_file)  # in another program, without the book
    for question in ("\n\nIn short, ", "\n\nThe end of the story is that "):
        ids = document_ids(tokenizer, question, state=state)  # the question goes on inside the document
        answer = gecko.generate(model, ids, state=state, max_new_tokens=60, seed=1)
        print(repr(question + tokenizer.decode(answer.tokens[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])

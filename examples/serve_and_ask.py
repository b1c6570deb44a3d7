"""Serve a model over OpenAI's API, and ask it with the openai client (`pip install openai`).

python examples/serve_and_ask.py MODEL QUESTION
"""

import subprocess
import sys

from openai import OpenAI


def main(model: str, question: str, tokens: str = "100") -> None:
    # Port 0 takes a free port, which the first line of the output names.
    command = [sys.executable, "-m", "gecko", "serve", model, "--name", "mine", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        stream = client.chat.completions.create(
            model="mine", messages=[{"role": "user", "content": question}], max_tokens=int(tokens), stream=True
        )
        for event in stream:
            print(event.choices[0].delta.content or "" if event.choices else "", end="", flush=True)
        print()
        server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])

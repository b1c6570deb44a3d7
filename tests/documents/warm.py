"""``gecko`` as a fork of a process that has imported it, because starting Python and PyTorch takes seconds.

``warm`` starts that process. ``python -S warm.py SOCKET ARGUMENTS...`` is the command ``gecko ARGUMENTS...``: it passes
its folder, variables, standard streams and signals on to a fork, and ends with the fork's exit code.
"""

import json
import os
import signal
import socket
import sys
from contextlib import contextmanager, suppress

IMPORTED = (
    "gecko.cli.eval", "gecko.cli.generate", "gecko.cli.train", "gecko.data", "gecko.eval",
    "gecko.experiments.report", "gecko.inference", "gecko.plan", "gecko.recipes.finetune", "gecko.serving.app",
    "gecko.train", "matplotlib.pyplot", "rich.console", "rich.progress", "scipy.stats", "torch", "uvicorn",
)  # fmt: skip
"""Modules that most commands import."""


def main() -> None:
    """Run a command in a fork of the process at a socket."""
    address, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as fork:
        fork.connect(address)
        request = {"arguments": arguments, "folder": os.getcwd(), "variables": dict(os.environ)}
        socket.send_fds(fork, [json.dumps(request).encode()], [0, 1, 2])
        answers = fork.makefile()
        process = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: os.kill(process, received))
        sys.exit(int(answers.readline() or 1))


def listen(address: str) -> None:
    """Import the package, then run each command that comes in a fork."""
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print(flush=True)
        while True:
            connection, _ = listener.accept()
            with suppress(ChildProcessError):  # none has ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                _run(connection)
            connection.close()


def _run(connection: socket.socket) -> None:
    """Run the command of a connection in this process, and end it."""
    message, streams, *_ = socket.recv_fds(connection, 1 << 17, 3)
    request = json.loads(message)
    connection.sendall(f"{os.getpid()}\n".encode())
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = ["gecko", *request["arguments"]]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = _exit_code()
    sys.stdout.flush()
    connection.sendall(f"{code}\n".encode())
    os._exit(code)


def _exit_code() -> int:
    import traceback

    from gecko.cli import main

    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def warm(address: str):  # type: ignore[no-untyped-def]  # typing would be imported by every command
    """Run the process that commands are forks of while the block runs."""
    import subprocess

    code = f"from documents.warm import listen; listen({address!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline(), "the process has ended"
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()

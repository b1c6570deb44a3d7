"""``gecko serve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gecko.allocator import return_freed_memory
from gecko.cli.models import Dtype
from gecko.extras import require

if TYPE_CHECKING:
    from gecko.serving.server import Options
    from gecko.serving.service import Service

_MEGABYTE = 1 << 20


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a run's: its newest checkpoint.")],
    host: Annotated[str, typer.Option(help="0.0.0.0 listens to other machines as well.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="MODEL's last part")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Texts that are continued side by side.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429.")] = 256,
    prefix_cache: Annotated[
        int, typer.Option(min=0, metavar="MB", help="Memory for states of beginnings that prompts share; 0: none.")
    ] = 256,
    states: Annotated[
        str | None, typer.Option(metavar="FOLDER", help='Requests may name its reading states: "state": "book".')
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="F", help="Clients must send the key that this file holds.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, metavar="MB", help="Of one request; 413 for more.")] = 16,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="400 for more.")] = 4_000_000,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="400 for more.")] = 4096,
    max_seconds: Annotated[float, typer.Option(help="For one request; it ends with what there is then.")] = 600,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")] = 30,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="bytes or a tokenizer's path.", show_default="the model's own")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Dtype = None,
) -> None:
    """Serve a model to programs that speak OpenAI's API, and to people by a web page.

    Answers `/v1/completions`, `/v1/chat/completions` and `/v1/models`, streamed where asked for; `/` is the
    page, `/health` and `/metrics` are for operators. Ctrl-C and SIGTERM let running requests finish.

    **Examples**

        gecko serve runs/demo

        gecko serve runs/demo --states books --api-key-file key.txt --host 0.0.0.0

        curl localhost:8000/v1/completions -d '{"prompt": "def "}' -H 'Content-Type: application/json'
    """
    for module in ("fastapi", "uvicorn", "prometheus_client", "jinja2"):
        require(module, "serve")
    from gecko.serving.limits import Limits
    from gecko.serving.server import Options, open_socket
    from gecko.serving.server import serve as run_server

    limits = Limits(
        rows=rows, queue=queue, body_bytes=max_body * _MEGABYTE, prompt_tokens=max_prompt_tokens,
        new_tokens=max_new_tokens, seconds=max_seconds,
    )  # fmt: skip
    options = Options(
        name or Path(model).expanduser().resolve().name, limits, prefix_cache * _MEGABYTE,
        _folder(states), _read_key(api_key_file), grace,
    )  # fmt: skip
    return_freed_memory()
    service = _build(model, tokenizer, device, dtype, options)
    with open_socket(host, port) as listening:
        bound = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"{options.name} is served at http://{shown}:{bound} (Ctrl-C ends)")
        typer.echo(f"conversations are written by {service.model.chat.source}")
        run_server(service, options, listening)
    typer.echo("ended")


def _build(name: str, tokenizer: str | None, device: str, dtype: str | None, options: Options) -> Service:
    from gecko.cli.models import find_model, load_model
    from gecko.serving.server import build_service

    folder = find_model(name)
    model, vocabulary = load_model(str(folder), tokenizer, device, dtype)
    return build_service(model, vocabulary, folder, options)


def _folder(name: str | None) -> Path | None:
    folder = None if name is None else Path(name).expanduser()
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"--states must be a folder with reading states (NAME.state); there is no {folder}.")
    return folder


def _read_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = Path(name).expanduser().read_text(encoding="utf-8").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{name} must hold the key: one line of visible ASCII characters. Try: openssl rand -hex 32")
    return key

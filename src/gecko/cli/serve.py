"""``gecko serve``: serve a model over HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gecko.cli.common import Device, Dtype, Model, TokenizerSpec, echo

if TYPE_CHECKING:
    from gecko.serving.app import Service
    from gecko.serving.server import Options

_MEGABYTE = 1 << 20


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Additional host name that clients may use, for example behind a proxy."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API.", show_default="last part of MODEL")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences that are generated in one batch.", show_default="as many as 2 GiB hold, 4 to 64"
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; further ones get status 429.")] = 256,
    prefix_cache: Annotated[
        int, typer.Option(min=0, metavar="MB", help="Memory for the states of shared prompt prefixes; 0 for none.")
    ] = 256,
    window_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the attention windows while text is generated: bfloat16 takes half their memory and less "
            "time, and rounds. For models on the CPU.",
            show_default="float32",
        ),
    ] = None,
    states: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help='Folder of reading states that requests may name: "state": "book".'),
    ] = None,
    states_disk: Annotated[
        int,
        typer.Option(
            min=0, metavar="MB", help="Limit for the states folder; clients may save and delete states if above 0."
        ),
    ] = 0,
    response_memory: Annotated[
        int, typer.Option(min=0, metavar="MB", help="Memory for responses that can be continued; 0 for none.")
    ] = 1024,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="F", help="File with the key that clients must send.")
    ] = None,
    max_body: Annotated[
        int, typer.Option(min=1, metavar="MB", help="Limit for the body of a request; status 413 above.")
    ] = 16,
    request_memory: Annotated[
        int, typer.Option(min=1, metavar="MB", help="Limit for all requests together; status 503 above.")
    ] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Limit for the tokens of a prompt; status 400 above.")
    ] = 4_000_000,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Limit for the tokens that a request may ask for; status 400 above.")
    ] = 4096,
    max_seconds: Annotated[
        float, typer.Option(help="Time limit of a request; it ends with the tokens generated until then.")
    ] = 600,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")] = 30,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Serve a model over OpenAI's API and a web page.

    The routes are `/v1/completions`, `/v1/chat/completions`, `/v1/responses` (all with streaming), `/v1/states` and
    `/v1/models`, the web page `/`, and `/health` and `/metrics` for operators. Ctrl-C and SIGTERM let
    running requests finish.

    **Examples**

        gecko serve runs/demo

        gecko serve runs/demo --states books --api-key-file key.txt --host 0.0.0.0

        curl localhost:8000/v1/completions -d '{"prompt": "def "}' -H 'Content-Type: application/json'
    """
    from gecko.runtime.process import bound_freed_memory, require

    for module in ("starlette", "uvicorn", "prometheus_client", "jinja2"):
        require(module, "serve")
    from gecko.cli.arguments import named_dtype
    from gecko.serving.limits import DEFAULT_ROWS, Limits
    from gecko.serving.server import Options, open_socket
    from gecko.serving.server import serve as run_server

    limits = Limits(
        rows=rows or DEFAULT_ROWS, queue=queue, body_bytes=max_body * _MEGABYTE,
        memory_bytes=request_memory * _MEGABYTE, prompt_tokens=max_prompt_tokens, new_tokens=max_new_tokens,
        seconds=max_seconds,
    )  # fmt: skip
    options = Options(
        name or Path(model).expanduser().resolve().name, limits, prefix_cache * _MEGABYTE,
        None if window_dtype is None else named_dtype(window_dtype, "--window-dtype"),
        response_memory * _MEGABYTE, _folder(states), states_disk * _MEGABYTE, _read_key(api_key_file), host,
        allowed_host or (), grace,
    )  # fmt: skip
    bound_freed_memory()
    service = _build(model, tokenizer, device, dtype, options, rows)
    with open_socket(host, port) as listening:
        bound = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        echo(f"{options.name} is served at http://{shown}:{bound} (Ctrl-C ends)")
        echo(f"conversations are written by {service.model.chat.source}")
        run_server(service, options, listening)
    echo("ended")


def _build(
    name: str, tokenizer: str | None, device: str, dtype: str | None, options: Options, rows: int | None
) -> Service:
    from gecko.cli.arguments import find_model, load_model
    from gecko.serving.limits import rows_in_memory
    from gecko.serving.server import build_service

    folder = find_model(name)
    model, vocabulary = load_model(str(folder), tokenizer, device, dtype)
    limits = replace(options.limits, rows=rows or rows_in_memory(model.empty_state().num_bytes))
    return build_service(model, vocabulary, folder, replace(options, limits=limits))


def _folder(name: str | None) -> Path | None:
    from gecko.io.files import found_at

    folder = None if name is None else Path(name).expanduser()
    if folder is not None and not folder.is_dir():
        there = f"{folder}: {found_at(folder)}" if folder.exists() else f"there is no {folder}"
        raise FileNotFoundError(f"--states must be a folder with reading states (NAME.state); {there}.")
    return folder


def _read_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = Path(name).expanduser().read_text(encoding="utf-8", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{name} must hold the key: one line of visible ASCII characters. Try: openssl rand -hex 32")
    return key

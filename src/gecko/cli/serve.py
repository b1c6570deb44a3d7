"""``gecko serve``: serve a model over HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gecko.cli.command import OnLoadedModel, option
from gecko.cli.common import echo

if TYPE_CHECKING:
    from gecko.serving.app import Service
    from gecko.serving.server import Options

_MEGABYTE = 1 << 20


class Serve(OnLoadedModel):
    """Serve a model over OpenAI's API and a web page.

    The routes are `/v1/completions`, `/v1/chat/completions`, `/v1/responses` (all with streaming), `/v1/states` and
    `/v1/models`, the web page `/`, and `/health` and `/metrics` for operators. Ctrl-C and SIGTERM let
    running requests finish.

    **Examples**

        gecko serve runs/demo

        gecko serve runs/demo --states books --api-key-file key.txt --host 0.0.0.0

        curl localhost:8000/v1/completions -d '{"prompt": "def "}' -H 'Content-Type: application/json'
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines."""
    port: int = option(8000, min=0, max=65535)
    """Port; 0 takes a free one."""
    allowed_host: list[str] = option([], metavar="NAME")
    """Additional host name that clients may use, for example behind a proxy."""
    name: str | None = option(show_default="last part of MODEL")
    """Name of the model in the API."""
    rows: int | None = option(min=1, show_default="as many as 2 GiB hold, 4 to 64")
    """Sequences that are generated in one batch."""
    queue: int = option(256, min=0)
    """Requests that may wait; further ones get status 429."""
    prefix_cache: int = option(256, min=0, metavar="MB")
    """Memory for the states of shared prompt prefixes; 0 for none."""
    window_dtype: str | None = option(show_default="float32")
    """Dtype of the attention windows while text is generated: bfloat16 takes half their memory and less time, and
    rounds. For models on the CPU."""
    states: str | None = option(metavar="FOLDER")
    """Folder of reading states that requests may name: "state": "book"."""
    states_disk: int = option(0, min=0, metavar="MB")
    """Limit for the states folder; clients may save and delete states if above 0."""
    response_memory: int = option(1024, min=0, metavar="MB")
    """Memory for responses that can be continued; 0 for none."""
    api_key_file: str | None = option(metavar="F")
    """File with the key that clients must send."""
    max_body: int = option(16, min=1, metavar="MB")
    """Limit for the body of a request; status 413 above."""
    request_memory: int = option(256, min=1, metavar="MB")
    """Limit for all requests together; status 503 above."""
    max_prompt_tokens: int = option(4_000_000, min=1)
    """Limit for the tokens of a prompt; status 400 above."""
    max_new_tokens: int = option(4096, min=1)
    """Limit for the tokens that a request may ask for; status 400 above."""
    max_seconds: float = 600
    """Time limit of a request; it ends with the tokens generated until then."""
    grace: float = option(30, min=0)
    """Seconds that running requests get after SIGTERM."""

    def run(self) -> None:
        from gecko.runtime.process import bound_freed_memory, require

        for module in ("starlette", "uvicorn", "prometheus_client", "jinja2"):
            require(module, "serve")
        from gecko.serving.server import open_socket, serve

        options = self.options()
        bound_freed_memory()
        service = self.service(options)
        with open_socket(self.host, self.port) as listening:
            shown = f"[{self.host}]" if ":" in self.host else self.host
            echo(f"{options.name} is served at http://{shown}:{listening.getsockname()[1]} (Ctrl-C ends)")
            echo(f"conversations are written by {service.model.chat.source}")
            serve(service, options, listening)
        echo("ended")

    def options(self) -> Options:
        from gecko.cli.arguments import named_dtype
        from gecko.serving.limits import DEFAULT_ROWS, Limits
        from gecko.serving.server import Options

        limits = Limits(
            rows=self.rows or DEFAULT_ROWS, queue=self.queue, body_bytes=self.max_body * _MEGABYTE,
            memory_bytes=self.request_memory * _MEGABYTE, prompt_tokens=self.max_prompt_tokens,
            new_tokens=self.max_new_tokens, seconds=self.max_seconds,
        )  # fmt: skip
        return Options(
            self.name or Path(self.model).expanduser().resolve().name, limits, self.prefix_cache * _MEGABYTE,
            None if self.window_dtype is None else named_dtype(self.window_dtype, "--window-dtype"),
            self.response_memory * _MEGABYTE, _folder(self.states), self.states_disk * _MEGABYTE,
            _read_key(self.api_key_file), self.host, self.allowed_host, self.grace,
        )  # fmt: skip

    def service(self, options: Options) -> Service:
        from gecko.cli.arguments import find_model
        from gecko.serving.limits import rows_in_memory
        from gecko.serving.server import build_service

        model, tokenizer = self.load()
        limits = replace(options.limits, rows=self.rows or rows_in_memory(model.empty_state().num_bytes))
        return build_service(model, tokenizer, find_model(self.model), replace(options, limits=limits))


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

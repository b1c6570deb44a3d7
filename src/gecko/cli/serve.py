"""``gecko serve``: serve a model over HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gecko.cli.command import LoadsModel
from gecko.cli.common import echo
from gecko.records import option
from gecko.runtime.process import bound_freed_memory, require
from gecko.serving.options import Options, rows_in_memory


class Serve(LoadsModel):
    """Serve a model over OpenAI's API and a web page.

    The routes are `/v1/completions`, `/v1/chat/completions`, `/v1/responses` (all with streaming), `/v1/states` and
    `/v1/models`, the web page `/`, and `/health` and `/metrics` for operators. Ctrl-C and SIGTERM let
    running requests finish.

    **Examples**

        gecko serve runs/demo

        gecko serve runs/demo --states books --api-key-file key.txt --host 0.0.0.0

        curl localhost:8000/v1/completions -d '{"prompt": "def "}' -H 'Content-Type: application/json'
    """

    port: int = option(8000, min=0, max=65535)
    """Port; 0 takes a free one."""
    rows: int | None = option(min=1, show_default="as many as 2 GiB hold, 4 to 64")
    """Sequences that are generated in one batch."""
    api_key_file: Path | None = option(metavar="F")
    """File with the key that clients must send."""
    options: Options

    def run(self) -> None:
        for module in ("starlette", "uvicorn", "prometheus_client", "jinja2"):
            require(module, "serve")
        from gecko.cli.arguments import find_model
        from gecko.serving.server import build_service, open_socket, serve

        key, name = _read_key(self.api_key_file), self.options.name or Path(self.model).expanduser().resolve().name
        bound_freed_memory()
        model, tokenizer = self.load()
        limits = replace(self.options.limits, rows=self.rows or rows_in_memory(model.empty_state().num_bytes))
        options = replace(self.options, name=name, limits=limits, api_key=key)
        service = build_service(model, tokenizer, find_model(self.model), options)
        with open_socket(options.host, self.port) as listening:
            host = f"[{options.host}]" if ":" in options.host else options.host
            echo(f"{name} is served at http://{host}:{listening.getsockname()[1]} (Ctrl-C ends)")
            echo(f"conversations are written by {service.model.chat.source}")
            serve(service, options, listening)
        echo("ended")


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    key = file.read_text(encoding="utf-8", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{file} must hold the key: one line of visible ASCII characters. Try: openssl rand -hex 32")
    return key

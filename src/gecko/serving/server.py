"""A model behind a socket, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn

from gecko.data import Tokenizer
from gecko.model import Gecko
from gecko.serving.app import create_app
from gecko.serving.chat import find_format
from gecko.serving.engine import Engine
from gecko.serving.limits import Limits
from gecko.serving.metrics import Metrics
from gecko.serving.prefix_cache import PrefixCache
from gecko.serving.service import ServedModel, Service
from gecko.serving.states import SavedStates
from gecko.serving.worker import Worker

_FLUSH_SECONDS = 5
"""For connections to send what they hold, once their requests have ended."""
_FILES = 1 << 16
"""Open files to ask for; macOS refuses to be asked for any number."""
_LOG = logging.getLogger("gecko.serving")


@dataclass(frozen=True)
class Options:
    """How a model is served."""

    name: str
    limits: Limits = field(default_factory=Limits)
    prefix_cache_bytes: int = 0
    """For the states of beginnings of prompts; 0: none are kept."""
    states: Path | None = None
    """Folder of saved reading states that requests may name."""
    api_key: str | None = None
    grace_seconds: float = 30
    """For running requests to finish, after the signal to stop."""


def build_service(model: Gecko, tokenizer: Tokenizer, folder: Path, options: Options) -> Service:
    """All parts, put together.

    Args:
        folder: the model's, where a chat template may lie.
    """
    cache = PrefixCache(options.prefix_cache_bytes) if options.prefix_cache_bytes else None
    limits = options.limits
    # Requests are counted before they reach the engine, and what leaves is taken out of it before what comes later
    # gets in: so it has room for all that are let through.
    engine = Engine(model, rows=limits.rows, max_queued=limits.rows + limits.queue, prefix_cache=cache)
    metrics = Metrics(engine, cache)
    served = ServedModel(
        options.name, model.config.vocab_size, model.empty_state().num_bytes, tokenizer, find_format(tokenizer, folder)
    )
    return Service(served, Worker(engine, metrics), metrics, limits, SavedStates(options.states))


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        OSError: the address is not of this machine, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen at {host} port {port}: {error.strerror}. Try another --port.") from error


class Server(uvicorn.Server):
    """At SIGTERM or Ctrl-C, running requests get time to finish, and new ones 503; a second signal ends at once."""

    def __init__(self, service: Service, options: Options) -> None:
        app = create_app(service, options.api_key)
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="on", server_header=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )  # fmt: skip
        self._service, self._grace = service, options.grace_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn at a signal, wherever the main thread is."""
        if self._loop is None or self._service.admission.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.admission.draining = True
        self._loop.call_soon_threadsafe(self._begin_draining, sig)

    def _begin_draining(self, sig: int) -> None:
        _LOG.warning("%s: finishing %d requests", signal.Signals(sig).name, self._service.admission.taken)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._grace
        while self._service.admission.taken and loop.time() < end:
            await asyncio.sleep(0.05)
        await self._service.worker.close()
        self.should_exit = True


def serve(service: Service, options: Options, listening: socket.socket) -> None:
    """Answer requests until a signal comes and all is done."""
    _allow_many_connections()
    Server(service, options).run(sockets=[listening])


def _allow_many_connections() -> None:
    """Every connection is an open file; the usual limit of 1,024 is meant for other programs."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return
    # A system may allow a process less than its own limit says.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

"""Serve a model on a socket until a signal arrives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from gecko.data import Tokenizer
from gecko.data.chat import find_format
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.scheduler import Engine
from gecko.models.gecko import Gecko
from gecko.runtime.process import keep_existing_objects
from gecko.serving.answer import Worker
from gecko.serving.app import Service, create_app
from gecko.serving.connection import Hosts, connection_class
from gecko.serving.limits import Metrics
from gecko.serving.options import Options
from gecko.serving.prepare import ServedModel
from gecko.serving.stores import ResponseStore, SavedStates

_FLUSH_SECONDS = 5
"""Seconds for connections to flush their buffers after the last request."""
_FILES = 1 << 16
"""Limit of open files to request; macOS rejects an unlimited number."""
_SWITCH_SECONDS = 0.0005
"""Interval in seconds after which a thread must release the GIL; the default of Python is 0.005."""
_LOG = logging.getLogger("gecko.serving")


def build_service(model: Gecko, tokenizer: Tokenizer, folder: Path, options: Options) -> Service:
    """Build the service from its parts. The model's ``folder`` may contain a chat template."""
    cache = PrefixCache(options.prefix_cache_bytes) if options.prefix_cache_bytes else None
    limits = options.limits
    # Admission counts requests before they reach the engine, and the engine executes cancellations before later
    # submissions, so the queue of the engine has room for all admitted requests.
    engine = Engine(
        model, rows=limits.rows, max_queued=limits.rows + limits.queue, prefix_cache=cache,
        window_dtype=None if options.window_dtype is None else getattr(torch, options.window_dtype),
    )  # fmt: skip
    metrics = Metrics(engine, cache)
    served = ServedModel(
        options.name or folder.name, model.config.vocab_size, model.empty_state().num_bytes, tokenizer,
        find_format(tokenizer, folder),
    )  # fmt: skip
    states = SavedStates(options.states, options.states_bytes)
    return Service(served, Worker(engine), metrics, limits, states, ResponseStore(options.response_bytes))


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raise OSError if the address does not belong to this
    machine, or is in use, ValueError if the host is empty, which the system would take for all networks."""
    if not host:
        raise ValueError("--host must name an address; got ''. Try 127.0.0.1, or 0.0.0.0 for all networks.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        advice = "Try another --port." if error.errno == errno.EADDRINUSE or port < 1024 else (
            "--host must be an address of this machine: 127.0.0.1 for itself only, 0.0.0.0 for all of its networks."
        )  # fmt: skip
        raise OSError(f"cannot listen at {host} port {port}: {error.strerror}. {advice}") from error


class Server(uvicorn.Server):
    """uvicorn server that lets running requests finish on SIGTERM or Ctrl-C; a second signal ends it at once."""

    def __init__(self, service: Service, options: Options) -> None:
        app = create_app(service, options.api_key, Hosts(options.host, options.allowed_hosts))
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="on", server_header=False, ws="none",
                http=connection_class(service.limits), timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )  # fmt: skip
        self._service, self._grace = service, options.grace_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; uvicorn calls this from the signal handler."""
        if self._loop is None or self._service.admission.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.admission.draining = True
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(sig), self._loop)

    async def _drain(self, sig: int) -> None:
        _LOG.warning("%s: finishing %d requests", signal.Signals(sig).name, self._service.admission.taken)
        end = time.monotonic() + self._grace
        while self._service.admission.taken and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await self._service.worker.close()
        self.should_exit = True


def serve(service: Service, options: Options, listening: socket.socket) -> None:
    """Serve requests until a signal arrives and the running requests are finished."""
    _allow_many_connections()
    # The event loop takes the GIL after every system call and waits up to this interval for a busy thread.
    sys.setswitchinterval(_SWITCH_SECONDS)
    keep_existing_objects()  # the garbage collector, which holds the GIL, skips all imported modules
    Server(service, options).run(sockets=[listening])


def _allow_many_connections() -> None:
    """Raise the limit of open files, usually 1,024: every connection is an open file."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return
    # A system may allow less than its reported limit.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

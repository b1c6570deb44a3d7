"""The Hugging Face hub without a network: its libraries would try again and again for half a minute."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from gecko.runtime.process import require


def is_reachable(address: str) -> bool:
    """Return whether the host of an address has a name record; with a proxy the proxy looks it up."""
    if urllib.request.getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(urllib.parse.urlsplit(address).hostname, None))
    except OSError:
        return False


@contextmanager
def cached_data_sets_without_network(extra: str) -> Iterator[None]:
    """Load data sets from the cache of the package ``datasets`` only, if the hub cannot be reached.

    ``extra`` is the package's extra that ``datasets`` comes with. Raise FileNotFoundError if the hub cannot be reached,
    and the cache does not hold a data set.
    """
    hub, datasets = require("huggingface_hub", extra), require("datasets", extra)
    if is_reachable(hub.constants.ENDPOINT):
        yield
        return
    settings = (hub.constants, datasets.config)
    before = [setting.HF_HUB_OFFLINE for setting in settings]
    for setting in settings:
        setting.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"{hub.constants.ENDPOINT} cannot be reached, and the cache lacks it: {error}"
        ) from error
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.HF_HUB_OFFLINE = value

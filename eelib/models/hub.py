"""The hub of models: where it can't be reached, that is known in seconds, and what is in the cache serves."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants

SECONDS = 3.0  # for a name to be resolved and a connection made; the library tries for 20


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Inside, models come from the hub, or without a network from the cache alone, with no further tries."""
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or not answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def answers(endpoint: str) -> bool:
    """Whether something takes connections where an address, or the proxy on the way to it, is."""
    address = urlsplit(endpoint)
    proxy = None if proxy_bypass(address.hostname or "") else getproxies().get(address.scheme)
    if proxy:
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    found = []

    def connect() -> None:
        try:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), timeout=SECONDS).close()
            found.append(True)
        except (OSError, ValueError):
            pass

    trying = threading.Thread(target=connect, daemon=True)  # to resolve a name has no limit of its own
    trying.start()
    trying.join(SECONDS + 1)
    return bool(found)

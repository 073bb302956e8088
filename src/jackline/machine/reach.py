"""Whether the Hugging Face hub can be reached at all, known within seconds: its own client tries for half a minute.

Owns one question, asked before the first request. A proxy connects by itself, so nothing is asked then.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies

WITHIN_S = 5.0
_HUB = "https://huggingface.co"


def hub_host(environ: Mapping[str, str] = os.environ) -> str:
    return urlsplit(environ.get("HF_ENDPOINT") or _HUB).hostname or "huggingface.co"


def hub_trouble(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the hub cannot be reached; None when it can be, or when its client was told to stay offline anyway."""
    if environ.get("HF_HUB_OFFLINE"):
        return None
    where = urlsplit(environ.get("HF_ENDPOINT") or _HUB)
    return find_trouble(hub_host(environ), where.port or (80 if where.scheme == "http" else 443))


def no_network(trouble: str) -> str:
    return f"no network: {hub_host()} cannot be reached ({trouble})"


def find_trouble(host: str, port: int = 443, within_s: float = WITHIN_S) -> str | None:
    """Why no connection to `host` can be made; None when one can be, or when a proxy would do it."""
    if getproxies().keys() & {"http", "https", "all"}:
        return None
    answer: list[str | None] = []

    def ask() -> None:
        try:
            socket.create_connection((host, port), timeout=within_s).close()
            answer.append(None)
        except OSError as error:
            answer.append(error.strerror or str(error))

    # The resolver has no deadline of its own; a thread that still waits for it must not hold the process.
    thread = threading.Thread(target=ask, name="jackline-resolve", daemon=True)
    thread.start()
    thread.join(within_s)
    return answer[0] if answer else f"no answer within {within_s:g} s"

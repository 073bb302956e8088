"""Whether the Hugging Face hub can be found at all, known within seconds: its own client tries for half a minute.

Owns one question, asked before the first request. A proxy answers names itself, so nothing is asked then.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies

WITHIN_S = 5.0


def hub_host(environ: Mapping[str, str] = os.environ) -> str:
    return urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or "huggingface.co"


def find_trouble(host: str, within_s: float = WITHIN_S) -> str | None:
    """Why the name of `host` cannot be resolved; None when it can be, or when a proxy would do it."""
    if getproxies().keys() & {"http", "https", "all"}:
        return None
    answer: list[str | None] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, 443)
            answer.append(None)
        except OSError as error:
            answer.append(error.strerror or str(error))

    # The resolver has no deadline of its own; a thread that still waits for it must not hold the process.
    thread = threading.Thread(target=ask, name="jackline-resolve", daemon=True)
    thread.start()
    thread.join(within_s)
    return answer[0] if answer else f"no answer within {within_s:g} s"

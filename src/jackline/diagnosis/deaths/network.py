"""Errors that come from the network or a server, and may be temporary."""

from __future__ import annotations

import re

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, place_line, ran_line
from jackline.diagnosis.deaths.traceback_text import ErrorText

_KINDS = frozenset(
    {
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "ConnectTimeout",
        "ConnectError",
        "ReadTimeout",
        "ReadTimeoutError",
        "ReadError",
        "RemoteProtocolError",
        "RemoteDisconnected",
        "IncompleteRead",
        "ChunkedEncodingError",
        "ProtocolError",
        "MaxRetryError",
        "NewConnectionError",
        "NameResolutionError",
        "ClientConnectorError",
        "ServerDisconnectedError",
        "EndpointConnectionError",
        "URLError",
        "gaierror",
        "SSLError",
        "SSLEOFError",
        "DistNetworkError",
        "LocalEntryNotFoundError",
    }
)
_WORDS = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Connection reset by peer|Connection refused"
    r"|Network is unreachable|Read timed out|Max retries exceeded|We couldn't connect to|\[Errno 110\]"
    r"|client socket has (?:failed to connect|timed out)"
)
# The server refused the request itself: a retry would fail too.
_REFUSED = re.compile(
    r"\b(40[0134569]|410|422) (?:Client Error|[A-Z])|CERTIFICATE_VERIFY_FAILED|Address already in use"
)
_TRY_LATER = re.compile(r"\b(429|5\d\d) (?:Server Error|Client Error|Too Many|Service|Bad Gateway|Gateway|Internal)")
_HOST = re.compile(r"host='([^']+)'|https?://([^/\s'\"]+)|\('([\w.-]+)', \d+\)")


def network(error: ErrorText, evidence: Evidence) -> Finding | None:
    text = error.text
    if _REFUSED.search(text) or any("multiprocessing" in frame.file for frame in error.frames[-2:]):
        return None
    is_timeout = error.name == "TimeoutError" and any(
        name in frame.file for frame in error.frames for name in ("socket.py", "ssl.py", "http/", "urllib", "asyncio")
    )
    if error.name not in _KINDS and not is_timeout and not _WORDS.search(text) and not _TRY_LATER.search(text):
        return None
    host = _HOST.search(text)
    who = next((group for group in host.groups() if group), "") if host else ""
    return Finding(
        "network",
        "likely",
        f"the network or a server failed{f' ({who})' if who else ''}{at_place(error.place)}",
        (*place_line(error.place), error.first_line[:240], *ran_line(evidence)),
        "try again; if it stays, look whether this machine reaches the address at all: `jackline doctor`",
        True,
        error.place,
    )

"""Errors that come from the network or a server, and may be temporary."""

from __future__ import annotations

import re

from jackline.diagnosis.deaths.evidence import Confidence, Evidence, Finding
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
        "ContentLengthError",
        "ClientPayloadError",
        "TransferEncodingError",
        "ClientOSError",
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
        "RendezvousConnectionError",
        "RendezvousTimeoutError",
    }
)
_WORDS = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Connection reset by peer|Connection refused"
    r"|Network is unreachable|Read timed out|Max retries exceeded|We couldn't connect to|\[Errno 110\]"
    r"|client socket has (?:failed to connect|timed out)|Run initialization has timed out"
    r"|\((?:SlowDown|RequestTimeout|InternalError|ServiceUnavailable|503|500)\) when calling"
)
# The server refused the request itself: a retry would fail too.
_REFUSED = re.compile(
    r"\b(40[0134569]|410|422) (?:Client Error|[A-Z])|CERTIFICATE_VERIFY_FAILED|Address already in use"
)
_TRY_LATER = re.compile(
    r"\b(429|5\d\d):? (?:Server Error|Client Error|Too Many|Service|Bad Gateway|Gateway|Internal|GET|PUT|POST)"
)
_MEETING_PLACE = re.compile(r"connect to \(?\[?([\w.:-]+?)\]?, (\d+)\)")
_HOST = re.compile(r"host='([^']+)'|https?://([^/\s'\"]+)|\('([\w.-]+)', \d+\)")


_OFFLINE = re.compile(
    r"outgoing traffic has been disabled|(?:HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE|offline mode is enabled",
    re.IGNORECASE,
)
_NO_ENTRY = re.compile(
    r"GatedRepo|\b40[13]\b.{0,20}(?:Client Error|Unauthorized|Forbidden)|Invalid (?:username or password|API key)"
    r"|\((?:AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|403)\) when calling"
    r"|Unable to locate credentials|NoCredentialsError|api_key not configured|No API key configured|not logged in",
    re.IGNORECASE,
)
_TOO_MANY = re.compile(
    r"\b429\b.{0,20}(?:Client Error|Too Many)|Too Many Requests|[Rr]ate limit(?:ed)? (?:exceeded|reached)"
)
_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED")
_PROXY = re.compile(r"ProxyError|Cannot connect to proxy|Tunnel connection failed|407 Proxy")


def refused_by_server(error: ErrorText, evidence: Evidence) -> Finding | None:
    """The far end, or a setting of this machine, said no: trying again at once would end in the same way."""
    text = error.text
    said = next(((title, hint, sure) for pattern, sure, title, hint in _REFUSALS if pattern.search(text)), None)
    if said is None:
        return None
    return Finding(
        "own_exception",
        said[2],
        f"{said[0]}{at_place(error.place)}",
        (*place_line(error.place), error.first_line[:240], *ran_line(evidence)),
        said[1],
        place=error.place,
    )


_REFUSALS: tuple[tuple[re.Pattern[str], Confidence, str, str], ...] = (
    (
        _OFFLINE,
        "certain",
        "a file is not in the local cache, and downloads are switched off (offline mode)",
        "unset HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) once to download it, or copy another machine's cache here",
    ),
    (
        _NO_ENTRY,
        "likely",
        "the server refused access: no login, or one without the right",
        "log in (`hf auth login`, `wandb login`, credentials in the environment); access to a gated model must be "
        "requested on its page",
    ),
    (
        _CERTIFICATE,
        "certain",
        "the server's certificate could not be verified",
        "behind a company's proxy, set SSL_CERT_FILE to its certificate; else update certifi: pip install -U certifi",
    ),
    (
        _PROXY,
        "likely",
        "the proxy refused or did not answer",
        "look at http_proxy, https_proxy and no_proxy in the environment: `env | grep -i proxy`",
    ),
)


def network(error: ErrorText, evidence: Evidence) -> Finding | None:
    text = error.text
    if _REFUSED.search(text) or any("multiprocessing" in frame.file for frame in error.frames[-2:]):
        return None
    is_timeout = error.name == "TimeoutError" and any(
        name in frame.file for frame in error.frames for name in ("socket.py", "ssl.py", "http/", "urllib", "asyncio")
    )
    is_later = _TRY_LATER.search(text) or _TOO_MANY.search(text)
    is_known = error.name in _KINDS and not error.kind.startswith("tarfile.")  # its ReadError is about a file
    if not is_known and not is_timeout and not _WORDS.search(text) and not is_later:
        return None
    host = _HOST.search(text)
    who = next((group for group in host.groups() if group), "") if host else ""
    title, hint = (
        "the network or a server failed",
        ("try again; if it stays, look whether this machine reaches the address at all: `jackline doctor`"),
    )
    if error.name == "DistNetworkError" or "client socket has" in text:
        title, hint = _no_rank_0(text)
    if _TOO_MANY.search(text):
        title, hint = "the server asked to wait: too many requests (429)", "wait some minutes, then run it again"
    return Finding(
        "network",
        "likely",
        f"{title}{f' ({who})' if who else ''}{at_place(error.place)}",
        (*place_line(error.place), error.first_line[:240], *ran_line(evidence)),
        hint,
        True,
        error.place,
    )


def _no_rank_0(text: str) -> tuple[str, str]:
    """A rank of torch.distributed did not find the first one."""
    found = _MEETING_PLACE.search(text)
    where = f" ({found[1]}, port {found[2]})" if found else ""
    return (
        f"this rank could not reach rank 0{where}",
        "rank 0 must run and listen there: look whether it was started or ended first, and whether MASTER_ADDR and "
        "MASTER_PORT are the same for all ranks",
    )

"""Who may read the page's data: the decisions, as pure functions of a request, and the headers of every answer.

Any web page that a person has open can send requests to this machine, so listening on the loopback address protects
nothing by itself. A request needs a method that only reads, a Host that is ours, no sign of another site, and for
data the token: 256 random bits in a file that only its owner can read, kept so that an open page continues when the
server is started again.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from jackline.immutable import immutable
from jackline.rundir.access.reading import open_plain
from jackline.rundir.access.writing import FOLDER_MODE

TOKEN_HEADER = "x-jackline-token"
READING = ("GET", "HEAD")
MAX_QUERY = 2000
MAX_PATH = 300
_PROXY_HOST = re.compile(r"(?:\*\.)?[a-z0-9](?:[a-z0-9.-]{0,250}[a-z0-9])?(?::\d{1,5})?", re.IGNORECASE)

Header = tuple[bytes, bytes]


@immutable
class Rules:
    """`proxy_hosts`: hosts under which a notebook's proxy shows the page; '*.example.org' means every subdomain."""

    token: str
    port: int
    proxy_hosts: tuple[str, ...] = ()


@immutable
class Refusal:
    status: int
    why: str


def refuse(rules: Rules, *, method: str, path: str, query: bytes, headers: Sequence[Header]) -> Refusal | None:
    """None for a request that may be answered. `headers` are the raw ones, as they came, names in lower case."""
    if method not in READING:
        return Refusal(405, "this page only reads")
    if len(query) > MAX_QUERY or len(path) > MAX_PATH:
        return Refusal(414, "the address is too long")
    hosts = _values(headers, b"host")
    if len(hosts) != 1 or not is_our_host(rules, hosts[0]):
        return Refusal(403, "this Host is not served: see `jackline dash --behind-proxy`")
    is_data = path.startswith("/api/")
    if is_from_elsewhere(rules, headers, is_data=is_data):
        return Refusal(403, "requests from other sites are refused")
    if is_data and not has_token(rules, headers):
        return Refusal(401, "the token is missing or wrong: open the address that `jackline dash` printed")
    return None


def is_our_host(rules: Rules, host: str) -> bool:
    name = host.lower()
    if name in {f"{own}:{rules.port}" for own in ("127.0.0.1", "localhost", "[::1]")}:
        return True
    return any(_matches(pattern.lower(), name) for pattern in rules.proxy_hosts)


def _matches(pattern: str, host: str) -> bool:
    bare = host if ":" in pattern else host.rpartition(":")[0] or host
    if not pattern.startswith("*."):
        return bare == pattern
    return bare.endswith(pattern[1:]) and re.fullmatch(r"[a-z0-9-]+(?:\.[a-z0-9-]+)*(?::\d{1,5})?", bare) is not None


def is_from_elsewhere(rules: Rules, headers: Sequence[Header], *, is_data: bool) -> bool:
    """A browser says which site a request comes from. Following a link to the page itself is allowed: it shows
    nothing without the token."""
    for origin in _values(headers, b"origin"):
        scheme, _, host = origin.partition("://")
        if scheme not in ("http", "https") or not is_our_host(rules, host):
            return True
    sites = _values(headers, b"sec-fetch-site")
    if all(site in ("same-origin", "none") for site in sites):
        return False
    is_link = _values(headers, b"sec-fetch-mode") == ["navigate"]
    return is_data or not is_link


def has_token(rules: Rules, headers: Sequence[Header]) -> bool:
    given = _values(headers, TOKEN_HEADER.encode())
    return len(given) == 1 and hmac.compare_digest(given[0].encode(), rules.token.encode())


def is_proxy_host(text: str) -> bool:
    """Whether --behind-proxy can be this: a host, or '*.' and a domain of at least two parts."""
    if _PROXY_HOST.fullmatch(text) is None:
        return False
    return not text.startswith("*.") or "." in text[2:]


def answer_headers(rules: Rules) -> dict[str, str]:
    """Of every answer, also of refusals. There is no CORS header, so no other site can read an answer."""
    places = " ".join(f"https://{host}" for host in rules.proxy_hosts)
    framed = f"'self' {places} https://colab.research.google.com" if places else "'none'"
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors {framed}"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
        "cross-origin-resource-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "permissions-policy": "camera=(), microphone=(), geolocation=()",
    }


def _values(headers: Sequence[Header], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


NAME = "dash-token"
_SHAPE = re.compile(r"[A-Za-z0-9_-]{43}")


def read_token(folder: Path, *, is_new: bool = False) -> str:
    """The token in `folder`, made when it is absent, damaged or readable by others. Raises OSError."""
    path = folder / NAME
    known = None if is_new else _read(path)
    if known is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    token = secrets.token_urlsafe(32)
    temporary = folder / f".{NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, token.encode() + b"\n")
    finally:
        os.close(fd)
    os.replace(temporary, path)
    return token


def _read(path: Path) -> str | None:
    try:
        fd = open_plain(path)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        is_private = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
        text = os.read(fd, 200).decode("ascii", "replace").strip() if is_private else ""
    finally:
        os.close(fd)
    return text if _SHAPE.fullmatch(text) else None

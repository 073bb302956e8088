"""Messages to people: a JSON webhook, ntfy, and the shape that Slack, Mattermost and Discord accept.

Only the standard library. An address is a secret: it is never printed and never stored.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jackline.errors import UsageError
from jackline.exporters.reader import EVENTS, About, Message
from jackline.exporters.sending import Refused, Sink

SCHEMA = "jackline.message/1"
TIMEOUT_S = 20.0
_SIGNS = {"stuck": "warning", "crashed": "rotating_light", "done": "white_check_mark", "memory": "warning"}
_URGENT = frozenset({"stuck", "crashed", "memory", "alarm"})
_TRY_AGAIN = frozenset({408, 425, 429})
NTFY = "https://ntfy.sh"


@dataclass
class Messenger(Sink):
    """`shape`: webhook, ntfy or slack."""

    shape: str
    url: str
    events: frozenset[str] = frozenset(EVENTS)

    def open(self, about: About) -> Mapping[str, float]:
        return {}

    def send_message(self, about: About, message: Message) -> None:
        url, body = shape_message(self.shape, self.url, about, message)
        post(url, body, message.id)

    def close(self, state: str) -> None:
        pass


def make_messenger(shape: str, url: str, events: frozenset[str]) -> Messenger:
    if shape == "ntfy" and "://" not in url:
        url = f"{NTFY}/{url}"
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            f"{shape} needs an address that begins with https://", hint=f"--to {shape}:https://HOST/PATH"
        )
    return Messenger(shape, url, events)


def shape_message(shape: str, url: str, about: About, message: Message) -> tuple[str, dict[str, Any]]:
    """The address and the body of one message."""
    title = f"{about.name}: {message.event}"
    if shape == "slack":
        return url, {"text": f"*{title}*\n{_lines(message)}"}
    if shape == "ntfy":
        server, _, topic = url.rstrip("/").rpartition("/")
        signs = [_SIGNS[message.event]] if message.event in _SIGNS else []
        priority = 4 if message.event in _URGENT else 3
        body = {"topic": topic, "title": title, "message": _lines(message), "priority": priority, "tags": signs}
        # Sent again after a kill, the message replaces itself where the server knows such ids.
        return server, {**body, "sequence_id": message.id}
    return url, {
        "schema": SCHEMA,
        "id": message.id,
        "run": about.name,
        "run_id": about.id,
        "event": message.event,
        "text": message.text,
        "at_s": message.at_s,
        "attempt": message.attempt,
        "step": message.step,
        "total": message.total,
        "metrics": {name: value if value - value == 0 else str(value) for name, value in message.metrics.items()},
    }


def _lines(message: Message) -> str:
    far = ""
    if message.step is not None:
        of = f" of {message.total:,.0f}" if message.total else ""
        far = f"step {message.step:,.0f}{of}"
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in message.metrics.items())
    return "\n".join(filter(None, (message.text, ", ".join(filter(None, (far, numbers))))))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the message, and perhaps a secret, to somebody who was not named."""

    def redirect_request(self, *_words: Any, **_named: Any) -> None:
        return None


def post(url: str, body: Mapping[str, Any], identity: str) -> None:
    """Raises Refused for an answer that no retry would change, OSError for all else."""
    headers = {"Content-Type": "application/json", "User-Agent": "jackline", "Idempotency-Key": identity}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        with error:
            if error.code < 500 and error.code not in _TRY_AGAIN:
                raise Refused(f"HTTP {error.code} {error.reason}") from None
            raise OSError(f"HTTP {error.code} {error.reason}") from None

"""Removes user names and passwords from URLs, before a text is stored or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# Up to the last @ before a slash or a blank: a password may hold an @. Written for text and for JSON strings.
_USER_INFO = r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s/?#\"'\\<>]{1,4096})@"
_KEYS = r"([?&](?:[\w.-]*(?:signature|token|secret|password|credential|sig|key))=)[^&\s\"'#]{1,4096}"


def without_secrets(text: str) -> str:
    """The text with '***' in place of a URL's user information. A bare user name stays, except where it can be a
    token (http); keys of signed URLs go as well."""
    if "://" not in text:
        return text
    return re.sub(_KEYS, rf"\1{HIDDEN}", re.sub(_USER_INFO, _hide, text), flags=re.IGNORECASE)


_CREDENTIALS = (
    (re.compile(r"(\b\w*(?:key|token|secret|passw(?:or)?d)[=:]\s*)[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(--?[\w-]*(?:key|token|secret|passw(?:or)?d)[= ])[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\bbearer\s+)[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\s(?:-u|--user)[= ]?)[^\s:\"']+:[^\s\"']+"), rf"\1{HIDDEN}"),
)


def without_credentials(command: str) -> str:
    """The same for a short piece of a shell command: also values that are called a key, token, secret or password."""
    for pattern, shown in _CREDENTIALS:
        command = pattern.sub(shown, command)
    return without_secrets(command)


def has_secrets(text: str) -> bool:
    return without_secrets(text) != text


def hide_in(value: Any) -> Any:
    """The same JSON value without secrets in its texts."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: hide_in(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [hide_in(entry) for entry in value]
    return value


def _hide(match: re.Match[str]) -> str:
    scheme, info = match[1], match[2]
    if ":" in info or scheme.lower().startswith("http"):
        return f"{scheme}{HIDDEN}@"
    return match[0]

"""Removes secrets and private paths from text that leaves this machine: a report that is sent to somebody.

Works on shapes, not on a list of known values: names that promise a secret, prefixes of known tokens, home folders.
Passwords in addresses are hidden by `rundir/access/secrets`, as everywhere. What looks like none of these stays.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from jackline.rundir.access.secrets import HIDDEN, without_secrets

_SECRET_NAME = (
    # Bounded, because a text may be hostile. Not the tokens of a text: `tokenizer`, `val_tokens: 1000`,
    # `eos_token_id: 2`, `pad_token='<pad>'`.
    r"[\w.-]{0,100}(?:token(?!i[sz])(?!s[\w.-]{0,100}[\"']?[\s=:]+[-+]?[\d.][\d_.e+-]*(?![^\s\"',;&)\]}#]))"
    r"(?![\w.-]{0,100}[\"']?[\s=:]+[\"']?(?:-?\d{1,6}(?![^\s\"',;&)\]}#])|[<\[]|(?:none|null|true|false)\b))"
    r"|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|private[_-]?key|credential)s?[\w.-]{0,100}"
)
_RULES = (
    # --api-key VALUE, HF_TOKEN=VALUE, "password": "VALUE", Authorization: Bearer VALUE
    (re.compile(rf"(?i)((?:--)?\b{_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(--{_SECRET_NAME}\s+)(?!-)\S+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (
        re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|AIza|wandb_v1_)[A-Za-z0-9_-]{8,}"),
        HIDDEN,
    ),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    # Stricter than what is stored: keys without an address before them, and bare user names.
    (re.compile(r"(?i)([?&](?:sig|signature|x-amz-signature|x-amz-credential|key)=)[^&\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@\"']+@"), rf"\1{HIDDEN}@"),
    # home folders, also of other machines: the name of a person stays private
    (re.compile(r"/(?:home|Users)/[^/\s\"':]+|/root(?=[/\s\"':]|$)"), "~"),
)


@lru_cache(maxsize=4)
def _home(_told: str) -> re.Pattern[str] | None:
    """The user's own home folder, wherever it is; looked up once, because a page redacts thousands of texts."""
    home = str(Path.home())
    return re.compile(re.escape(home) + r"(?=[/\s\"':]|$)") if len(home) > 1 else None


def redact(text: Any) -> str:
    found = without_secrets(str(text))
    if (home := _home(os.environ.get("HOME", ""))) is not None:
        found = home.sub("~", found)
    for pattern, instead in _RULES:
        found = pattern.sub(instead, found)
    return found

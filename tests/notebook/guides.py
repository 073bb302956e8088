"""The commands and cells of docs/guides/{colab,ssh,troubleshooting}.md, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "guides"
NAMES = ("colab", "ssh", "troubleshooting")
# What begins a line in a block: typed here, in a cell, or on another machine.
_TYPED = re.compile(r"^(?:!|ssh user@host )?(jackline .*)$")


def read_guide(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def find_blocks(name: str, language: str = "") -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", read_guide(name), re.DOTALL | re.MULTILINE)
    return [text for word, text in blocks if word == language]


def find_commands(name: str) -> list[str]:
    """Every `jackline ...` line of the blocks, in order, without its comment."""
    lines = [line for block in find_blocks(name) for line in block.splitlines()]
    return [re.split(r"\s+# ", match[1])[0].strip() for line in lines if (match := _TYPED.match(line))]


def find_mentions(name: str) -> list[str]:
    """`jackline ...` inside sentences."""
    text = re.sub(r"^```.*?^```$", "", read_guide(name), flags=re.DOTALL | re.MULTILINE)
    return [mention for mention in re.findall(r"`(jackline [^`]+)`", text) if "..." not in mention]

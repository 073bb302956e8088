"""The blocks of docs/guides/own-loop.md, for tests that run them."""

from __future__ import annotations

import re

from tests.session.nursery import ROOT

TEXT = (ROOT / "docs" / "guides" / "own-loop.md").read_text(encoding="utf-8")


def find_block(language: str, begins: str = "") -> str:
    """The one block of `language` whose text begins with the pattern `begins`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    found = [text for word, text in blocks if word == language and re.match(begins, text, re.IGNORECASE)]
    assert len(found) == 1, f"{len(found)} blocks of {language or 'no language'} begin with {begins!r}"
    return str(found[0])


def before_and_after() -> tuple[str, str]:
    """The two programs that the guide's diff is about."""
    lines = find_block("diff", " import torch").splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    return before, "".join(line[1:] for line in lines if line[0] in " +")

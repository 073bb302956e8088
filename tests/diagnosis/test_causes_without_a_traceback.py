"""Errors that were never raised where they are printed: a library gives them as the cause of its own."""

from __future__ import annotations

import pytest

from jackline.diagnosis.deaths.traceback_text import fatal_chain
from tests.diagnosis.deaths import best, said

THEN = "\n\nThe above exception was the direct cause of the following exception:\n\n"
RAISED = """Traceback (most recent call last):
  File "/w/train.py", line 14, in <module>
    path = hf_hub_download("some/model", "config.json")
  File "/v/lib/python3.11/site-packages/huggingface_hub/file_download.py", line 1962, in _raise_on_head_call_error
    raise LocalEntryNotFoundError(
huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub"""


@pytest.mark.parametrize(
    ("causes", "title"),
    [
        (
            "httpx2.HTTPStatusError: Client error '429 Too Many Requests' for url 'http://h/x'\nFor more ..."
            f"{THEN}huggingface_hub.errors.HfHubHTTPError: 429 Too Many Requests for url: http://h/x.",
            "the server asked to wait: too many requests (429)",
        ),
        (
            "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: http://h/x",
            "the server refused access",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_the_cause_is_told_and_placed_at_the_callers_line(causes: str, title: str) -> None:
    finding = best(said(f"Retrying in 8s [Retry 5/5].\n{causes}{THEN}{RAISED}"))
    assert finding.title.startswith(title)
    assert finding.place is not None and finding.place.line == 14


def test_text_above_a_chain_is_no_error() -> None:
    chain = fatal_chain(f"Note: this is slow\nError\n{THEN}{RAISED}".splitlines())
    assert chain is not None and [error.name for error in chain.errors] == ["LocalEntryNotFoundError"]

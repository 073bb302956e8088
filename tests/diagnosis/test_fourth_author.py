"""Ends of programs that a fourth author wrote: what was first said about them was true of others, not of these."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.deaths import best, run_script, said


def raised(error: str, source: str = "load(path)") -> str:
    return f'Traceback (most recent call last):\n  File "/w/load.py", line 6, in <module>\n    {source}\n{error}'


@pytest.mark.parametrize(
    "error",
    [
        "KeyError: 'module.encoder.weight'",
        'RuntimeError: Error(s) in loading state_dict for N:\n\tMissing key(s) in state_dict: "_orig_mod.a.weight".',
        "RuntimeError: Error(s) in loading state_dict for Net:\n\tUnexpected key(s) in state_dict: "
        '"module.a.weight", "module.a.bias".',
    ],
)
def test_names_of_a_wrapped_model_are_no_other_shape(error: str) -> None:
    found = best(said(raised(error)))
    assert found.hint.startswith(
        "one side was wrapped when it was saved: DataParallel and DDP put `module.` in front"
    )


def test_other_missing_names_are_not_taken_for_a_wrapper() -> None:
    error = 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "head.weight".'
    assert best(said(raised(error))).hint.startswith("the checkpoint belongs to a model of another shape")
    assert "wrapped" not in best(said(raised("KeyError: 'caption'"))).hint


@pytest.mark.parametrize(
    ("error", "cause", "title", "hint"),
    [
        (
            "urllib.error.HTTPError: HTTP Error 404: Not Found",
            "own_exception",
            "urllib.error.HTTPError: HTTP Error 404",
            "the server has nothing at that address",
        ),
        (
            "httpx.HTTPStatusError: Client error '404 Not Found' for url 'http://h/w.bin'",
            "own_exception",
            "httpx.HTTPStatusError: Client error '404",
            "the server has nothing at that address",
        ),
        (
            "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
            "network",
            "the network or a server failed",
            "try again",
        ),
        (
            "httpx.HTTPStatusError: Server error '503 Service Unavailable' for url 'http://h/w.bin'",
            "network",
            "the network or a server failed (h)",
            "try again",
        ),
        (
            "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: http://h/w.bin",
            "network",
            "the server asked to wait",
            "wait some minutes",
        ),
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to "
            "connect to (10.0.0.7, 29500).",
            "network",
            "this rank could not reach rank 0 (10.0.0.7, port 29500)",
            "rank 0 must run and listen there",
        ),
        (
            "tarfile.ReadError: file could not be opened successfully:\n- method gz: ReadError('not a gzip file')",
            "own_exception",
            "tarfile.ReadError: file could not be opened",
            "a file is damaged, cut off, or of another kind",
        ),
        ("httpx.ReadError", "network", "the network or a server failed", "try again"),
    ],
)
def test_what_a_server_or_an_archive_said_is_told_apart(error: str, cause: str, title: str, hint: str) -> None:
    found = best(said(raised(error)))
    assert found.cause == cause
    assert found.title.startswith(title)
    assert found.hint.startswith(hint)


def test_a_command_whose_output_was_captured_is_not_said_to_have_printed(tmp_path: Path) -> None:
    code = """
    import subprocess, sys
    print("preparing", flush=True)
    subprocess.check_output([sys.executable, "-c", "import sys; sys.exit('bad magic')"], stderr=subprocess.PIPE)
    """
    found = best(run_script(tmp_path, code))
    assert "the line above the traceback: preparing" in found.detail
    assert found.hint.startswith(
        "the command failed, not this script: run it by itself; where its output was captured"
    )


def test_an_assertion_without_a_message_says_how_to_learn_more(tmp_path: Path) -> None:
    found = best(run_script(tmp_path, "def check(batch):\n    assert len(batch) == 4\ncheck([1])"))
    assert (found.title, found.confidence) == ("AssertionError (train.py:2)", "certain")
    assert found.hint.startswith("the condition of that line was false: ")
    assert "condition" not in best(said(raised("AssertionError: four, please"))).hint


def test_a_database_may_be_locked_by_the_script_itself(tmp_path: Path) -> None:
    code = """
    import sqlite3
    first, second = (sqlite3.connect("index.db", isolation_level=None, timeout=0) for _ in range(2))
    first.execute("begin exclusive")
    second.execute("create table t(x)")
    """
    found = best(run_script(tmp_path, code))
    assert found.hint.startswith("another connection holds it: one of this script whose transaction is not committed")

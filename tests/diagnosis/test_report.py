"""Findings as a person sees them."""

from __future__ import annotations

from dataclasses import replace

from jackline.diagnosis.deaths.evidence import Finding
from jackline.diagnosis.deaths.report import death_text, summary_line
from jackline.diagnosis.deaths.sentences import memory_line
from tests.diagnosis.deaths import GIB, evidence


def test_a_doubt_is_said_in_the_summary() -> None:
    sure = Finding("killed_by_someone", "certain", "killed by someone")
    assert summary_line((sure,)) == "killed by someone"
    assert summary_line((replace(sure, confidence="likely"),)) == "killed by someone (likely)"
    assert summary_line((Finding("unknown", "not sure", "it is gone"), sure)) == "it is gone (not sure)"


def test_without_details_the_text_still_says_how_long_it_ran() -> None:
    assert death_text((Finding("exit_code", "certain", "it ended", (), "look"),), evidence()) == (
        "error: it ended\n       it ran for 41 s\nhint: look"
    )


def test_more_than_eight_lines_are_never_shown_and_the_hint_stays() -> None:
    many = Finding("own_exception", "certain", "it failed", tuple(f"line {n}" for n in range(20)), "fix it")
    other = Finding("kernel_oom", "not sure", "memory ran out")
    lines = death_text((many, other, other, other), evidence()).splitlines()
    assert lines == [
        "error: it failed",
        "       line 0",
        "       line 1",
        "       line 2",
        "       line 3",
        "       or: memory ran out (not sure)",
        "       or: memory ran out (not sure)",
        "hint: fix it",
    ]


def test_others_under_the_same_limit_are_told_when_they_fill_it() -> None:
    assert memory_line(evidence(last_memory_bytes=7 * GIB)) == (
        "peak memory 3.0 GiB of 8.0 GiB RAM; with all others, 7.0 GiB were in use",
    )
    assert memory_line(evidence(last_memory_bytes=4 * GIB)) == ("peak memory 3.0 GiB of 8.0 GiB RAM",)
    assert memory_line(evidence(peak_memory_bytes=0, last_memory_bytes=0)) == ()

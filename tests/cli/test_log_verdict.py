"""What a log says by its size and age."""

from __future__ import annotations

import pytest

from jackline.diagnosis.logs.verdict import LogFacts, LogVerdict, are_only_warnings, judge_log

NOW_S = 10_000.0


def judge(
    lines: tuple[str, ...], *, is_live: bool | None = True, age_s: float = 5.0, size: int | None = 100
) -> LogVerdict:
    facts = LogFacts("out.log", size, NOW_S - age_s, lines)
    return judge_log(facts, is_live=is_live, running_s=720.0, now_s=NOW_S)


def test_a_log_that_is_not_there_yet() -> None:
    assert judge((), size=None) == LogVerdict("absent", "there is no log yet")
    assert judge((), size=None, is_live=False) == LogVerdict("absent", "there is no log")


def test_an_empty_log_is_explained() -> None:
    assert judge((), size=0) == LogVerdict(
        "empty",
        "empty after 12 min; programs that are not Python may keep their output back off a terminal (--tty)",
    )
    assert judge((), size=0, is_live=False) == LogVerdict("empty", "empty")


def test_output_of_an_adopted_process_that_goes_to_no_file_is_not_called_kept_back() -> None:
    facts = LogFacts("out.log", 100, NOW_S, (), is_adopted=True)
    assert judge_log(facts, is_live=True, running_s=17.0, now_s=NOW_S) == LogVerdict(
        "empty", "empty: what goes to a terminal or a pipe cannot be read"
    )


def test_a_log_with_nothing_but_our_own_notes_is_empty_too() -> None:
    assert judge(("", "  "), size=4000).kind == "empty"


def test_nothing_but_warnings_is_said() -> None:
    lines = (
        "/venv/lib/x.py:3: UserWarning: old API",
        "  warnings.warn('old API')",
        "2026-11-15 WARNING: TF_ENABLE_ONEDNN_OPTS",
        "W1115 02:39:23.453000 18217 torch/distributed/run.py:874] ***",
    )
    assert judge(lines) == LogVerdict("warnings only", "nothing but warnings so far (4 lines)")
    assert judge(lines[:1], is_live=False) == LogVerdict("warnings only", "nothing but warnings (1 line)")
    assert judge(lines, size=10 << 20).kind == "growing"  # too long to be nothing but warnings


@pytest.mark.parametrize(
    ("lines", "are_only"),
    [
        ([], False),
        (["step 1"], False),
        (["UserWarning: x", "step 1"], False),
        (["  indented without a warning above"], False),
        (["DeprecationWarning: x", "  x = y"], True),
    ],
)
def test_what_counts_as_a_warning(lines: list[str], are_only: bool) -> None:
    assert are_only_warnings(lines) is are_only


def test_growing_silent_ended_and_unknown_are_told_apart() -> None:
    assert judge(("step 1",)) == LogVerdict("growing", "growing, last line 5.0 s ago")
    assert judge(("step 1",), age_s=300) == LogVerdict("silent", "silent for 5 min")
    assert judge(("step 1",), is_live=False) == LogVerdict("ended", "complete")
    assert judge(("step 1",), is_live=None, age_s=300) == LogVerdict("unknown", "last line 5 min ago")

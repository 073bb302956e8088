"""Which checkpoint is resumed from, and when one is to blame for a death. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jackline.diagnosis.deaths.evidence import Cause
from jackline.rundir.records.foreign import (
    ADVANCED,
    FAILED,
    OTHER,
    Fingerprint,
    ForeignRecord,
    Known,
    Load,
)
from jackline.supervisor.foreign.choice import Candidate, EndingOfLoad, choose_from, outcome_of, refusal

TRACEBACK = (
    "step 1",
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 9, in main',
    "    model.load_state_dict(torch.load(path))",
    "RuntimeError: Error(s) in loading state_dict",
)
AT_LOADING = EndingOfLoad("own_exception", False, False, False, 4.0, TRACEBACK)


def mark(digest: str, *, at_ns: int = 1, is_whole: bool = True) -> Fingerprint:
    return Fingerprint(7, at_ns, 100, ("whole:" if is_whole else "parts:") + digest)


def candidate(name: str, order_ns: int, problem: str = "", *, is_kept: bool = False) -> Candidate:
    return Candidate(Path(name), Path(name), mark(name), order_ns, problem=problem, is_kept=is_kept)


def test_the_latest_that_may_be_used_is_chosen_and_newer_ones_are_named() -> None:
    old, torn, good = candidate("a", 1), candidate("c", 3, "it was cut off"), candidate("b", 2)
    choice = choose_from([old, torn, good])
    assert (choice.chosen, choice.passed_over) == (good, (torn,))
    assert not choice.is_refused


def test_nothing_at_all_is_no_refusal_and_only_bad_ones_are() -> None:
    assert not choose_from([]).is_refused
    assert choose_from([candidate("a", 1, "it has 0 bytes")]).is_refused


def test_an_exception_while_loading_blames_the_checkpoint() -> None:
    assert outcome_of(AT_LOADING) == FAILED


@pytest.mark.parametrize("cause", ["segfault", "abort", "bus_error"])
def test_a_crash_before_any_progress_blames_the_checkpoint(cause: Cause) -> None:
    assert outcome_of(replace(AT_LOADING, cause=cause, output_tail=())) == FAILED


@pytest.mark.parametrize(
    "cause",
    [
        "stopped",
        "time_limit",
        "preempted",
        "killed_by_someone",
        "kernel_oom",
        "memory_guard",
        "cuda_oom",
        "other_signal",
        "network",
        "disk_full",
        "import_error",
        "syntax_error",
        "stuck",
        "unknown",
    ],
)
def test_no_stop_and_no_outside_cause_blames_the_checkpoint(cause: Cause) -> None:
    assert outcome_of(replace(AT_LOADING, cause=cause)) == OTHER


def test_a_wanted_end_never_blames_the_checkpoint_whatever_it_looked_like() -> None:
    assert outcome_of(replace(AT_LOADING, is_stop=True)) == OTHER


def test_an_error_that_has_nothing_to_do_with_loading_does_not_blame_it() -> None:
    tail = (
        "Traceback (most recent call last):",
        '  File "/data/checkpoint-tests/train.py", line 3, in main',
        "    for batch in DataLoader(dataset):",
        "ValueError: learning rate must be positive",
    )
    assert outcome_of(replace(AT_LOADING, output_tail=tail)) == OTHER


def test_steps_or_a_newer_checkpoint_acquit_it() -> None:
    assert outcome_of(replace(AT_LOADING, has_trained=True)) == ADVANCED
    assert outcome_of(replace(AT_LOADING, made_progress=True)) == ADVANCED
    assert outcome_of(replace(AT_LOADING, duration_s=3600.0)) == OTHER


def test_a_failure_sticks_to_the_content_until_it_loads_after_all() -> None:
    known = Known("last.pt", mark("x"), 1, 1, (Load(2, FAILED), Load(3, OTHER)))
    record = ForeignRecord((known,))
    assert record.failed_in(mark("x", at_ns=99)) == 2
    assert record.failed_in(mark("y")) is None
    assert record.with_known(replace(known, loads=(*known.loads, Load(4, ADVANCED)))).failed_in(mark("x")) is None


def test_samples_of_a_large_file_are_the_same_content_only_at_the_same_time() -> None:
    one = mark("x", at_ns=1, is_whole=False)
    assert one.has_content_of(replace(one, inode=8))
    assert not one.has_content_of(replace(one, mtime_ns=2))


def test_a_refusal_says_what_each_one_is_and_what_to_type() -> None:
    suspect = replace(candidate("a.pt", 1, "attempt 2 failed while it loaded this one"), is_suspect=True)
    choice = choose_from([candidate("b.pt", 2, "it has 0 bytes"), suspect])
    assert str(refusal("mine", choice)) == (
        "error: run 'mine' cannot resume: none of its checkpoints can be trusted\n"
        "       b.pt: it has 0 bytes\n"
        "       a.pt: attempt 2 failed while it loaded this one\n"
        "hint: jackline resume mine --from a.pt tries that one again; "
        "jackline resume mine --from-scratch begins at the start"
    )


# -- the record on disk ----------------------------------------------------------------------------------------------

RECORD = ForeignRecord(
    (Known("/w/last.pt", mark("x"), 5, 1, (Load(2, FAILED, "own_exception"),), kept="kept/0001/last.pt"),), 1
)


def test_the_record_comes_back_as_it_was() -> None:
    assert ForeignRecord.from_json(RECORD.to_json()) == RECORD


@pytest.mark.parametrize("value", [None, [], 3, "x", {"known": 5}, {"known": [None, 1, {}, {"path": 3}]}])
def test_a_damaged_record_is_read_as_far_as_it_goes(value: object) -> None:
    assert ForeignRecord.from_json(value).known == ()


@pytest.mark.parametrize("kept", ["/etc/passwd", "kept/../x/y", "kept/1/..", "../kept/1/a", 5, "kept/0001"])
def test_a_forged_place_of_a_copy_is_ignored(kept: object) -> None:
    value = RECORD.to_json()
    value["known"][0]["kept"] = kept
    assert ForeignRecord.from_json(value).known[0].kept == ""


def test_the_record_stays_bounded_and_never_forgets_a_copy() -> None:
    record = RECORD
    for number in range(300):
        record = record.with_known(Known("last.pt", mark(str(number)), 10 + number, 1))
    assert len(record.known) <= 200
    assert record.known[0] == RECORD.known[0]

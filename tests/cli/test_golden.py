"""Directories of every format ever written, read by today's readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.cli.text.status import status_text
from jackline.cli.view.run_view import read_view
from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import host_name

GOLDEN = Path(__file__).parents[1] / "golden"
NOW_S = 1_794_012_121.0  # 2026-11-07 00:42:01 UTC


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine is the one that lost its power; all others are elsewhere."""
    monkeypatch.setenv("JACKLINE_HOST", "spot-17")
    host_name.cache_clear()
    yield
    host_name.cache_clear()


def text_of(name: str) -> str:
    """The text with the place of the golden folder taken out."""
    run = RunDir(GOLDEN / name)
    return status_text(read_view(run, now_s=NOW_S)).replace(str(GOLDEN), "GOLDEN")


def test_every_golden_directory_is_read_here() -> None:
    assert sorted(path.name for path in GOLDEN.glob("format*")) == [
        "format1-alive-elsewhere",
        "format1-finished",
        "format1-killed-oom",
        "format1-machine-lost",
        "format1-stuck",
        "format1-torn",
    ]


@pytest.mark.usefixtures("here")
def test_a_run_on_another_machine_is_unknown_from_here() -> None:
    assert text_of("format1-alive-elsewhere") == (
        "train-alive-elsewhere: unknown from here: it was last seen 2026-11-06 21:30:01 UTC (3 h 12 min ago) on host "
        "'gpu-box-7', in attempt 1\n"
        "  last seen:  3 h 12 min ago; what follows was true then\n"
        "  progress:   train, 1,200 of 5,000 steps (24 %), 2.0 steps/s, about 31 min 40 s to go\n"
        "  now:        stepping, work/train.py:41 in step: loss.backward()\n"
        "  verdict:    PROGRESS: running\n"
        "  memory:     it uses 4.0 GiB, at most 4.5 GiB so far; 5.0 GiB of 16.0 GiB (cgroup /job) are in use, 31 %\n"
        "  gpu 0:      NVIDIA L4, 11.0 GiB of 23.0 GiB, 97 % busy\n"
        "  cpu:        1.0 cores\n"
        "  log:        GOLDEN/format1-alive-elsewhere/out.log, 59 B; last line 3 h 12 min ago\n"
        "  command:    python train.py --lr 0.001\n"
        "  code:       commit 0123456789ab\n"
        "hint: ask on that host, or `jackline why` for what its files say"
    )


@pytest.mark.usefixtures("here")
def test_a_finished_run_is_finished_wherever_it_ran() -> None:
    assert text_of("format1-finished") == (
        "train-finished: finished 10 min ago in attempt 1, after 3 h 12 min\n"
        "  done: finished after 3 h 12 min\n"
        "        memory peaked at 4.5 GiB of 16.0 GiB (cgroup /job)\n"
        "  progress:   train, 5,000 of 5,000 steps (100 %)\n"
        "  log:        GOLDEN/format1-finished/out.log, 54 B; complete\n"
        "  command:    python train.py --lr 0.001\n"
        "  code:       commit 0123456789ab"
    )


@pytest.mark.usefixtures("here")
def test_a_run_that_the_kernel_killed_keeps_its_explanation() -> None:
    assert text_of("format1-killed-oom") == (
        "train-killed-oom: killed 3 h 21 min ago in attempt 1, after 1 min\n"
        "  error: the kernel killed it because memory ran out: the limit is 16.0 GiB\n"
        "         memory peaked at 15.9 GiB of 16.0 GiB (cgroup /job)\n"
        "         it was growing by 238 MiB/s in work/data.py:42 in load: rows.append(parse(line))\n"
        "         the kernel counted 1 out-of-memory kill in its memory cgroup during this attempt\n"
        "         kernel log: Memory cgroup out of memory: Killed process 720 (python) anon-rss:16400000kB\n"
        "  hint: load less at once: fewer DataLoader workers, a smaller batch, streamed or memory-mapped data\n"
        "  log:        GOLDEN/format1-killed-oom/out.log, 89 B; complete\n"
        "  command:    python train.py --lr 0.001\n"
        "  code:       commit 0123456789ab\n"
        "hint: `jackline why train-killed-oom` tells more, `jackline resume train-killed-oom` continues"
    )


@pytest.mark.usefixtures("here")
def test_a_run_whose_machine_was_lost_is_dead_and_says_what_it_did_last() -> None:
    lines = text_of("format1-machine-lost").splitlines()
    assert lines[:3] == [
        "train-machine-lost: gone in attempt 1: no heartbeat since 2026-11-06 21:30:01 UTC (3 h 12 min ago), pid 720 "
        "is gone; nobody saw how it ended",
        "  last seen:  3 h 12 min ago; what follows was true then",
        "  progress:   train, 1,200 of 5,000 steps (24 %), 2.0 steps/s, about 31 min 40 s to go",
    ]
    assert lines[-1] == (
        "hint: `jackline why train-machine-lost` tells more, `jackline resume train-machine-lost` continues"
    )


@pytest.mark.usefixtures("here")
def test_a_stuck_run_shows_the_line_its_incident_and_what_is_off() -> None:
    lines = text_of("format1-stuck").splitlines()
    assert lines[2:4] == [
        "  now:        waiting for a lock, work/train.py:17 in main: lock.acquire()",
        "  verdict:    STUCK for 4 min 50 s: the main thread waits for a lock at work/train.py:17",
    ]
    assert "  incident:   the main thread waits for a lock at work/train.py:17: attempts/001/incident-1.txt" in lines
    assert "  off:        stacks: py-spy may not read this process (ptrace)" in lines
    assert "  log:        GOLDEN/format1-stuck/out.log, 200 B; nothing but warnings (2 lines)" in lines


@pytest.mark.usefixtures("here")
def test_a_torn_run_is_read_as_far_as_it_goes() -> None:
    assert text_of("format1-torn") == (
        "train-torn: gone in attempt 1: no heartbeat since a time that cannot be read, no process of it is left; "
        "nobody saw how it ended\n"
        "  log:        GOLDEN/format1-torn/out.log, 51 B; complete\n"
        "  command:    python train.py --lr 0.001\n"
        "  code:       commit 0123456789ab\n"
        "hint: `jackline why train-torn` tells more, `jackline resume train-torn` continues"
    )
    events = read_lines(RunDir(GOLDEN / "format1-torn").supervisor_events)
    assert [record["event"] for record in events.records] == ["started"]
    assert events.num_damaged == 0  # a torn last line is not damage: its writer may be writing it


@pytest.mark.parametrize("name", ["format1-finished", "format1-killed-oom"])
def test_the_evidence_of_an_old_death_is_judged_today_as_it_was_then(name: str) -> None:
    ending = json.loads((GOLDEN / name / "attempts" / "001" / "exit.json").read_text())
    findings = diagnose(Evidence.from_json(ending["evidence"]))
    assert [(finding.cause, finding.confidence) for finding in findings] == [
        (finding["cause"], finding["confidence"]) for finding in ending["findings"]
    ]

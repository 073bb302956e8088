"""`jackline why` as a person types it: on live runs, dead ones, copies, and any process."""

from __future__ import annotations

import calendar
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.cli.text.clock import clock
from jackline.cli.text.why_live import check_pid, verdict_words
from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, SentSignal
from jackline.diagnosis.deaths.report import death_text
from jackline.diagnosis.logs.clues import explain_lines, explain_log, explain_output, find_last_written, find_logs
from jackline.errors import UsageError
from jackline.rundir import atomic
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import identify
from jackline.rundir.run_file import describe_run, write_run_file
from jackline.supervisor.hang.verdict import Verdict
from tests.deadline import HANGS_S
from tests.supervisor.hanging import LOCK_ABBA, SLEEP_LOOP, Hanging, hanging, running, wait_until

NOTHING = "the log is empty: the command has printed nothing at all (Python's buffering is switched off here)"
SLEEP = "import time\ntime.sleep(1000)  # HERE\n"


def why(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jackline", "why", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=HANGS_S,
    )


@pytest.fixture
def run(clean_environment: Path) -> RunDir:
    """A run named 'train' with one attempt and no state yet."""
    folder = RunDir(clean_environment / "train")
    folder.attempt(1).path.mkdir(parents=True)
    contents = describe_run(
        "train", kind="command", argv=["python", "train.py"], settings={}, options={}, cwd=Path("/")
    )
    write_run_file(folder, contents)
    return folder


def first_attempt(run: RunDir) -> AttemptDir:
    return run.attempt(1)


def a_dead_process() -> dict[str, Any]:
    process = subprocess.Popen(["sleep", "1000"])
    known = identify(process.pid)
    process.kill()
    process.wait()
    assert known is not None
    return known.to_json()


def me() -> dict[str, Any]:
    known = identify(os.getpid())
    assert known is not None
    return known.to_json()


def write_state(run: RunDir, supervisor: dict[str, Any], *, age_s: float = 0.0, **more: Any) -> float:
    at_s = time.time() - age_s
    atomic.write_json(run.supervisor_file, {"at_s": at_s, "supervisor": supervisor, **more})
    return at_s


def write_start(run: RunDir, child: dict[str, Any]) -> None:
    atomic.write_json(first_attempt(run).start_file, {"child": child, "started_at_s": time.time() - 100})


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Hanging]:
    with hanging(tmp_path / "work", LOCK_ABBA, waits="lock") as started:
        wait_until(lambda: len(list(Path(f"/proc/{started.pid}/task").iterdir())) == 2, "the other thread")
        yield started


def child_of(program: Hanging) -> dict[str, Any]:
    known = identify(program.pid)
    assert known is not None
    return known.to_json()


# -- alive ----------------------------------------------------------------------------------------------------------


def test_a_watched_run_shows_its_verdict_and_its_stacks_now(run: RunDir, program: Hanging) -> None:
    write_start(run, child_of(program))
    verdict = {"kind": "STUCK", "label": "STUCK_LOCK", "for_s": 65.0, "text": "nothing has moved for 1 min 5 s: ..."}
    incident = {"number": 1, "path": "/x/incident-1.txt"}
    write_state(run, me(), verdict=verdict, silent_s=66.0, incidents=[incident])
    run.out_log.write_text("2026-11-15T02:00:00Z epoch 1\n")
    done = why("train")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith(f"run 'train' is alive: attempt 1, pid {program.pid}, for ")
    assert lines[1:4] == [
        "STUCK: nothing has moved for 1 min 5 s: ...",
        "silent for 1 min 6 s",
        "incident: /x/incident-1.txt",
    ]
    assert lines[4] == f"doing: waiting for a lock at {program.script}:{program.line()} `with second:  # HERE`"
    assert "  main thread 'MainThread' " in done.stdout
    assert f"  > {program.script}:{program.line()} in <module>    with second:  # HERE\n" in done.stdout
    assert "  thread 'other' " in done.stdout
    assert lines[-1] == f"run folder: {run.path}"


def test_all_shows_every_frame(run: RunDir, program: Hanging) -> None:
    write_start(run, child_of(program))
    write_state(run, me())
    frame = "in Thread._bootstrap"
    assert frame not in why("train").stdout
    assert frame in why("train", "--all").stdout


def test_a_live_run_as_json(run: RunDir, program: Hanging) -> None:
    write_start(run, child_of(program))
    write_state(run, me(), verdict={"kind": "STUCK", "text": "x"}, silent_s=3.0)
    value = json.loads(why("train", "--json").stdout)
    assert (value["run"], value["state"], value["pid"], value["silent_s"]) == ("train", "alive", program.pid, 3.0)
    assert (value["verdict"]["kind"], value["verdict"]["text"]) == ("STUCK", "x")
    assert value["doing"]["frame"]["line"] == program.line()
    assert value["stacks"][0]["threads"][0]["frames"]


def test_a_run_whose_supervisor_is_gone_is_told_as_unwatched_and_looked_at(run: RunDir, program: Hanging) -> None:
    write_start(run, child_of(program))
    gone = a_dead_process()
    seen_s = write_state(run, gone, age_s=3600)
    done = why("train", "--for", "3s")
    assert done.stderr == "[jackline] nobody watches it: looking at it for 3.0 s ...\n"
    assert (
        f"no heartbeat since {clock(seen_s)}, its supervisor (pid {gone['pid']}) is gone; "
        "`jackline watch train` takes it over\n"
    ) in done.stdout
    assert "\nSTUCK, as far as 3." in done.stdout
    assert f"{program.script}:{program.line()} `with second:  # HERE`" in done.stdout


def test_a_stale_heartbeat_of_a_live_supervisor_is_told(run: RunDir, program: Hanging) -> None:
    write_start(run, child_of(program))
    seen_s = write_state(run, me(), age_s=100)
    stale = f"no heartbeat since {clock(seen_s)}, although its supervisor lives: the machine may be overloaded\n"
    assert stale in why("train", "--for", "1s").stdout


def test_a_run_that_printed_nothing_or_only_warnings_is_told_so(run: RunDir, program: Hanging) -> None:
    write_start(run, child_of(program))
    write_state(run, me())
    run.out_log.write_text("")
    nothing = (
        "note: the log is empty: the command has printed nothing at all (Python's buffering is switched off here)"
    )
    assert nothing in why("train").stdout.splitlines()
    run.out_log.write_text("2026-11-15T02:00:00Z x.py:3: UserWarning: old\n2026-11-15T02:00:00Z   warnings.warn(y)\n")
    only = "note: the log holds only warnings (2 lines): the program itself has printed nothing yet"
    assert only in why("train").stdout.splitlines()


# -- ended ----------------------------------------------------------------------------------------------------------


def segfault() -> Evidence:
    return Evidence(
        exit_code=None,
        signal=signal.SIGSEGV,
        duration_s=75.0,
        ended_at_s=time.time() - 60,
        output_tail=("epoch 1",),
        fault_text=(
            "Fatal Python error: Segmentation fault\n\n"
            'Current thread 0x1 (most recent call first):\n  File "/me/t.py", line 3 in f\n'
        ),
        peak_memory_bytes=3 << 30,
        memory_limit_bytes=8 << 30,
        memory_limit_source="MemTotal",
    )


def end(run: RunDir, evidence: Evidence) -> None:
    write_start(run, a_dead_process())
    write_state(run, a_dead_process(), age_s=60)
    run.out_log.write_text("2026-11-15T02:00:00Z epoch 1\n")
    atomic.write_json(first_attempt(run).exit_file, {"exit_code": 139, "evidence": evidence.to_json()})
    first_attempt(run).incident(1).write_text("SUSPECT (STUCK_LOCK) at 2026-11-15 02:00:00 UTC\n\nmore\n")


def test_a_dead_run_is_explained_from_its_files(run: RunDir) -> None:
    evidence = segfault()
    end(run, evidence)
    done = why("train")
    assert (done.returncode, done.stderr) == (0, "")
    incident = first_attempt(run).incident(1)
    assert done.stdout == (
        f"run 'train' failed at {clock(evidence.ended_at_s)} after 1 min 15 s (attempt 1, {run.path})\n"
        f"{death_text(diagnose(evidence), evidence)}\n"
        "certainty: certain\n"
        f"incident: {incident} (SUSPECT (STUCK_LOCK) at 2026-11-15 02:00:00 UTC)\n"
        f"log: {run.out_log}\n"
    )


PROGRESSING = {"rule": "progress", "at": "/w/train.py:9 `step()`", "would_change": "5 s in which nothing moves"}


def test_the_evidence_of_an_end_is_that_of_its_explanation_and_not_of_the_last_verdict(run: RunDir) -> None:
    end(run, segfault())
    write_state(run, a_dead_process(), age_s=60, evidence=PROGRESSING)
    lines = why("train", "--evidence").stdout.partition("What this explanation rests on\n")[2].splitlines()
    assert lines[:3] == ["  rule: segfault", "  certainty: certain", "  it ended with: SIGSEGV"]
    assert "  stack of its crash: t.py:3" in lines
    assert not any("progress" in line or "change its mind" in line or "it stands at" in line for line in lines)
    evidence = replace(segfault(), exit_code=7, signal=None, fault_text="")
    atomic.write_json(first_attempt(run).exit_file, {"exit_code": 7, "evidence": evidence.to_json()})
    said = why("train", "--evidence").stdout
    assert "  rule: exit_code\n  certainty: not sure\n  it ended with: exit code 7\n" in said
    assert said.endswith("  what would change its mind: an error in its output or in a log file of its own\n")


def test_an_end_for_standing_still_shows_the_rule_of_the_verdict_too(run: RunDir) -> None:
    sent = SentSignal(1.0, 15, "stuck")
    evidence = replace(segfault(), signal=15, fault_text="", sent_signals=(sent,))
    end(run, evidence)
    write_state(run, a_dead_process(), age_s=60, evidence={**PROGRESSING, "rule": "deadlocked"})
    said = why("train", "--evidence").stdout
    assert "What this explanation rests on\n  rule: stuck\n  certainty: certain\n" in said
    assert "What the verdict rests on\n  rule: deadlocked\n" in said


def test_a_finished_run_says_so_once(run: RunDir) -> None:
    evidence = replace(segfault(), exit_code=0, signal=None, fault_text="")
    write_start(run, a_dead_process())
    atomic.write_json(first_attempt(run).exit_file, {"exit_code": 0, "evidence": evidence.to_json()})
    assert why("train").stdout == (
        f"run 'train' finished at {clock(evidence.ended_at_s)} after 1 min 15 s (attempt 1, {run.path})\n"
        "peak memory 3.0 GiB of 8.0 GiB RAM\n"
        f"log: {run.out_log}\n"
    )


def test_a_copied_run_is_explained_by_its_path_elsewhere(run: RunDir, tmp_path: Path) -> None:
    end(run, segfault())
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    shutil.rmtree(run.path)
    value = json.loads(why(str(copy), "--json").stdout)
    assert (value["state"], value["origin"], value["findings"][0]["cause"]) == ("dead", "exit.json", "segfault")
    assert value["incidents"] == [str(copy / "attempts" / "001" / "incident-1.txt")]


def test_an_end_that_nobody_wrote_down_is_said_to_be_unknown(run: RunDir) -> None:
    child = a_dead_process()
    write_start(run, child)
    seen_s = write_state(
        run,
        a_dead_process(),
        age_s=7200,
        verdict={"kind": "PROGRESS", "text": "running (1.0 cores)"},
        now={"what": "in the backward pass", "file": "/me/t.py", "line": 8, "source": "loss.backward()"},
        memory={"used_bytes": 2 << 30, "limit_bytes": 4 << 30},
    )
    run.out_log.write_text("2026-11-15T02:00:00Z epoch 1\n2026-11-15T02:00:01Z epoch 2\n")
    assert why("train").stdout == (
        f"run 'train' is gone (attempt 1, {run.path})\n"
        f"no heartbeat since {clock(seen_s)}, pid {child['pid']} is gone\n"
        "last verdict: PROGRESS: running (1.0 cores)\n"
        "last seen doing: in the backward pass at /me/t.py:8 `loss.backward()`\n"
        "last memory: 2.0 GiB of 4.0 GiB\n"
        "nobody wrote down how it ended: the machine was lost, or everything was killed at once\n"
        "last lines of its output:\n"
        "  epoch 1\n"
        "  epoch 2\n"
        "hint: jackline resume train continues it\n"
        f"log: {run.out_log}\n"
    )


def test_a_restart_of_the_machine_is_told(run: RunDir) -> None:
    child = {**a_dead_process(), "boot_id": "another"}
    write_start(run, child)
    seen_s = write_state(run, child, age_s=60)
    said = f"no heartbeat since {clock(seen_s)}; the machine has been restarted since, so pid {child['pid']} is gone"
    assert said in why("train").stdout.splitlines()


def test_a_run_of_another_host_is_unknown_from_here(run: RunDir) -> None:
    child = {**a_dead_process(), "host": "node-7"}
    write_start(run, child)
    seen_s = write_state(run, child, age_s=60)
    lines = why("train").stdout.splitlines()
    assert lines[:2] == [
        f"run 'train' is unknown from here (attempt 1, {run.path})",
        f"no heartbeat since {clock(seen_s)}; it ran on 'node-7': whether it lives cannot be told from here",
    ]


def test_an_end_that_only_the_keeper_saw_is_judged_from_its_note(run: RunDir) -> None:
    child = a_dead_process()
    write_start(run, child)
    seen_s = write_state(run, a_dead_process(), age_s=60)
    wait = {"exit_code": 1, "signal": None, "ended_at_s": time.time(), "max_rss_bytes": 1 << 30}
    atomic.write_json(first_attempt(run).wait_file, wait)
    first_attempt(run).raw_out.write_text(
        'Traceback (most recent call last):\n  File "/me/t.py", line 3, in <module>\n    f()\nValueError: bad\n'
    )
    done = why("train")
    assert f"no heartbeat since {clock(seen_s)}, pid {child['pid']} is gone\n" in done.stdout
    assert "ValueError: bad" in done.stdout
    assert "/me/t.py:3" in done.stdout
    assert json.loads(why("train", "--json").stdout)["findings"][0]["cause"] == "own_exception"


def test_a_damaged_exit_file_is_told_with_what_is_left(run: RunDir) -> None:
    write_start(run, a_dead_process())
    path = first_attempt(run).exit_file
    atomic.write_json(path, {"exit_code": 1, "text": "error: it was so", "evidence": {"exit_code": 1}})
    lines = why("train").stdout.splitlines()
    assert lines[1:3] == [f"{path} is damaged", "error: it was so"]


def test_a_run_that_never_started_is_told(clean_environment: Path) -> None:
    folder = RunDir(clean_environment / "train")
    folder.path.mkdir(parents=True)
    contents = describe_run("train", kind="command", argv=["x"], settings={}, options={}, cwd=Path("/"))
    write_run_file(folder, contents)
    assert why("train").stdout == (
        f"run 'train' never started (attempt 0, {folder.path})\n"
        "it was never started: there is no attempt\n"
        "hint: jackline resume train\n"
    )


# -- any process ----------------------------------------------------------------------------------------------------


def test_a_stranger_is_looked_at_and_named(tmp_path: Path) -> None:
    with hanging(tmp_path / "work", LOCK_ABBA, waits="lock", inject=False) as program:
        done = why("--pid", str(program.pid), "--for", "3s")
        lines = done.stdout.splitlines()
        place = f"{program.script}:{program.line()} `with second:  # HERE`"
        out = program.script.parent / "out"
    assert done.stderr == f"[jackline] looking at process {program.pid} for 3.0 s ...\n"
    assert lines[0].startswith(f"process {program.pid} has run for ")
    assert lines[1].startswith("STUCK, as far as 3.")
    assert place in lines[1]
    assert lines[2] == f"doing: waiting for a lock at {place}"
    assert lines[3].startswith("0.0 cores now, CPU ")
    assert any(line.startswith(f"output {out}: 0 B, written ") for line in lines)
    assert lines[-1].startswith("hint: look at the lines above for a lock")


def test_a_stranger_asleep_is_not_accused(tmp_path: Path) -> None:
    with hanging(tmp_path / "work", SLEEP, waits="sleep", inject=False) as program:
        done = why("--pid", str(program.pid), "--for", "2s")
    assert "\nasleep during the 2." in done.stdout
    assert f"it was looked at; that may be meant: sleeping at {program.script}:" in done.stdout
    assert "; that ends by itself in 16 min " in done.stdout


def test_a_stranger_as_json(tmp_path: Path) -> None:
    with hanging(tmp_path / "work", SLEEP_LOOP, waits="sleep", inject=False) as program:
        value = json.loads(why("--pid", str(program.pid), "--for", "1s", "--json").stdout)
        assert value["pid"] == program.pid
        assert value["verdict"]["kind"] in ("PROGRESS", "WAITING", "SUSPECT")  # by how long each nap is late
        assert value["doing"]["frame"]["line"] == program.line()
        assert value["logs"][0]["path"] == str(program.script.parent / "out")


def test_a_process_of_a_run_says_which_run_knows_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKLINE_RUN_DIR", "/x/runs/train")
    with running(["sleep", "1000"], stdout=subprocess.DEVNULL) as process:
        done = why("--pid", str(process.pid), "--for", "1s")
    assert "it belongs to run 'train': `jackline why /x/runs/train` knows more\n" in done.stdout


def test_no_such_process_is_a_usage_error() -> None:
    done = why("--pid", "4194305")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: there is no process 4194305\nhint: `ps -u $USER -o pid,etime,args` lists yours\n")


def test_another_persons_process_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(["sleep", "1000"]) as process:
        owner = Path(f"/proc/{process.pid}").stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(UsageError) as caught:
            check_pid(process.pid)
    import pwd

    assert str(caught.value) == (
        f"error: process {process.pid} belongs to user '{pwd.getpwuid(owner).pw_name}': only its owner and root may "
        f"look into it\nhint: sudo jackline why --pid {process.pid}"
    )
    assert caught.value.exit_code == 2


def test_a_zombie_is_a_usage_error() -> None:
    process = subprocess.Popen(["true"])
    wait_until(lambda: b") Z " in Path(f"/proc/{process.pid}/stat").read_bytes(), "its end")
    done = why("--pid", str(process.pid))
    process.wait()
    assert done.returncode == 2
    assert done.stderr == (
        f"error: process {process.pid} has ended already; its parent has not asked how\n"
        "hint: its log and the kernel log (dmesg) may tell why\n"
    )


def test_a_run_and_a_pid_together_are_refused(run: RunDir) -> None:
    done = why("train", "--pid", "1")
    assert done.returncode == 2
    assert done.stderr == (
        "error: a run and --pid were given; only one of them can be meant\nhint: jackline why train\n"
    )


def test_an_unknown_run_and_a_bad_duration_are_refused(clean_environment: Path, run: RunDir) -> None:
    assert why("trian").stderr == (
        f"error: there is no run 'trian' in {clean_environment}\nhint: did you mean 'train'?\n"
    )
    done = why("train", "--for", "soon")
    assert (done.returncode, done.stderr) == (
        2,
        "error: 'soon' is not a duration\nhint: write 90, 90s, 15m, 1h30m or 2d\n",
    )


# -- clues ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], NOTHING),
        (["epoch 1", "x.py:1: UserWarning: y"], ""),
        (
            ["/s/x.py:3: FutureWarning: old", "  call(x)", "", "DeprecationWarning: z"],
            "the log holds only warnings (3 lines): the program itself has printed nothing yet",
        ),
        (
            ["WARNING: All log messages before"],
            "the log holds only warnings (1 line): the program itself has printed nothing yet",
        ),
        (["x.py:1: UserWarning: y", "    indented", "loss 0.5"], ""),
    ],
)
def test_a_log_without_news_is_explained(lines: list[str], words: str) -> None:
    assert explain_lines(lines) == words


def test_a_long_log_is_not_read_for_that(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("UserWarning: x\n" * 10_000)
    assert explain_log(log) == ""
    assert explain_log(tmp_path / "absent") == ""


HELD = (
    "its output is {} and PYTHONUNBUFFERED is not set: Python holds up to 8 KiB of printed lines back, so an empty "
    "or old log does not mean that nothing was printed"
)


@pytest.mark.parametrize(
    ("words", "env", "target", "clue"),
    [
        ([], {}, "file", HELD.format("a file")),
        ([], {}, "pipe", HELD.format("a pipe")),
        ([], {"PYTHONUNBUFFERED": "1"}, "file", ""),
        (["-u"], {}, "file", ""),
        ([], {}, "null", "its output goes to /dev/null: whatever it prints is lost"),
    ],
)
def test_python_s_buffering_explains_an_empty_log(
    words: list[str], env: dict[str, str], target: str, clue: str, tmp_path: Path
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with open(tmp_path / "log", "wb") as log:
        out = {"file": log, "pipe": subprocess.PIPE, "null": subprocess.DEVNULL}[target]
        command = [sys.executable, *words, "-c", SLEEP]
        with running(command, stdout=out, env={**plain, **env}) as process:
            assert explain_output(process.pid, is_python=True) == clue


def test_a_c_program_holds_its_lines_back_too() -> None:
    with running(["sleep", "1000"], stdout=subprocess.PIPE) as process:
        clue = explain_output(process.pid, is_python=False)
    assert clue == "its output is a pipe: a C program holds up to 4 KiB of lines back until it ends"


def test_logs_and_the_last_checkpoint_are_found(tmp_path: Path) -> None:
    text = """
import pathlib, time
log = open("train.log", "w"); log.write("step 1\\n"); log.flush()
data = open("shard.bin", "wb")
folder = pathlib.Path("ckpt"); folder.mkdir()
(folder / "model.pt").write_text("x")
time.sleep(1000)
"""
    with hanging(tmp_path / "work", text, waits="sleep", inject=False) as program:
        folder = program.script.parent
        os.utime(folder / "ckpt" / "model.pt", (time.time() + 5, time.time() + 5))
        logs = find_logs([program.pid])
        last = find_last_written([program.pid], started_at_s=0.0)
        nothing_new = find_last_written([program.pid], started_at_s=time.time() + 1000)
    assert [(log.path, log.is_output) for log in logs] == [
        (str(folder / "out"), True),
        (str(folder / "train.log"), False),
    ]
    assert last is not None and nothing_new is not None
    assert (last.folder, last.name, last.is_open) == (str(folder / "ckpt"), "model.pt", False)
    assert nothing_new.is_open


def test_a_short_look_never_says_simply_stuck() -> None:
    stuck = Verdict("STUCK", "STUCK_LOCK", 0.0, "nothing has moved for 6.0 s: ...")
    assert verdict_words(stuck, 7.0) == "STUCK, as far as 7.0 s can tell: nothing has moved for 6.0 s: ..."
    busy = Verdict("BUSY", "RUNNING_NATIVE", 0.0, "busy in x.py:3 for 7.0 s (1.0 cores)")
    assert verdict_words(busy, 7.0) == "BUSY: busy in x.py:3 for 7.0 s (1.0 cores)"


def test_a_time_is_that_of_the_logs_stamps_wherever_it_is_read_and_has_its_date_on_another_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = calendar.timegm((2026, 11, 15, 12, 0, 0))
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        assert clock(now_s - 3600, now_s) == "11:00:00 UTC"
        assert clock(now_s - 86400, now_s) == "2026-11-14 12:00:00 UTC"
    time.tzset()


def test_the_evidence_of_a_verdict_can_be_shown_and_kept(tmp_path: Path) -> None:
    """A process that nobody watches: looked at, explained, and kept as a case that can be replayed."""
    from jackline.supervisor.hang.verdict import read_case
    from tests.supervisor.hanging import LOCK_ABBA, hanging

    kept = tmp_path / "case.json"
    with hanging(tmp_path / "p", LOCK_ABBA, waits="lock") as program:
        command = [sys.executable, "-m", "jackline", "why", "--pid", str(program.pid), "--for", "3s", "--evidence"]
        done = subprocess.run([*command, "--save-case", str(kept)], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert "STUCK, as far as" in done.stdout
    assert "they wait for each other" in done.stdout
    assert "What the verdict rests on\n  rule: deadlocked\n" in done.stdout
    assert "what would change its mind: one of the threads named runs again" in done.stdout
    samples, _, said = read_case(json.loads(kept.read_text()))
    assert said["label"] == "DEADLOCK"
    assert len(samples) >= 2

"""`jackline status`, on runs of real, gone and unknown processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jackline.cli.commands.status import command
from jackline.errors import UsageError
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import identify, read_state
from jackline.rundir.records.rescue import RescueRecord, write_rescue
from jackline.rundir.records.start import StartRecord
from jackline.rundir.records.start import write_start as write_bare_start
from jackline.supervisor.start import request_stop
from tests.deadline import HANGS_S
from tests.rundir.made import (
    foreign_process,
    gone_process,
    make_run,
    this_process,
    write_exit,
    write_start,
    write_state,
)
from tests.shell import wait_for

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
NOW_S = 1_794_000_000.0  # 2026-11-06 21:20:00 UTC


def status(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def lines_of(*words: str) -> list[str]:
    result = status(*words)
    assert result.exit_code == 0, result.exception
    return result.output.splitlines()


def live_run(runs: Path, name: str = "train-1", **facts: Any) -> RunDir:
    """A run whose supervisor and command are this very process."""
    run = make_run(runs / name)
    write_start(run, this_process())
    known = {"at_s": NOW_S, "attempt": 1, "started_at_s": NOW_S - 2460, "silent_s": 3.0}
    write_state(run, this_process(), **{**known, **facts})
    run.out_log.write_text("2026-11-15T02:18:34Z step 1\n")
    return run


@pytest.fixture
def runs(clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("jackline.cli.view.run_view.wall_clock_s", lambda: NOW_S)
    return clean_environment


def test_a_live_run_says_how_far_it_is_and_what_would_be_lost(runs: Path) -> None:
    live_run(
        runs,
        progress={"phase": "train", "done": 1200, "total": 5000, "unit": "steps", "rate_per_s": 2.0, "eta_s": 1900.0},
        now={"what": "stepping", "file": "/w/train.py", "line": 41, "function": "step", "source": "loss.backward()"},
        verdict={"kind": "PROGRESS", "label": "RUNNING_CPU", "for_s": 2.0, "text": "running"},
        memory={
            "used_bytes": 5 * GIB,
            "limit_bytes": 16 * GIB,
            "limit_source": "cgroup /job",
            "tree_rss_bytes": 4 * GIB,
            "peak_bytes": 4 * GIB,
            "seconds_to_limit": None,
        },
    )
    lines = lines_of("train-1")
    assert lines[0] == "train-1: alive, attempt 1, for 41 min"
    assert lines[1:] == [
        "  progress:   train, 1,200 of 5,000 steps (24 %), 2.0 steps/s, done in about 31 min 40 s (21:51:40 UTC)",
        "  now:        stepping, /w/train.py:41 in step: loss.backward()",
        "  verdict:    PROGRESS: running",
        "  memory:     it uses 4.0 GiB, at most 4.0 GiB so far; 5.0 GiB of 16.0 GiB (cgroup /job) are in use, 31 %",
        "  at risk:    everything since the start, 41 min: Jackline knows of no checkpoint",
        f"  log:        {runs}/train-1/out.log, 28 B; growing, last line 3.0 s ago",
        "  command:    python train.py",
    ]


@pytest.mark.parametrize(
    ("waited_s", "words"),
    [(0.5, "done in about 1.5 s (21:20:01 UTC)"), (10.0, "expected to be done at 21:19:52 UTC, it takes longer")],
)
def test_an_estimate_that_has_passed_with_work_left_says_so(waited_s: float, words: str, runs: Path) -> None:
    """A long validation after the second of three epochs: 'done in about 0.0 s'."""
    progress = {"done": 2, "total": 3, "unit": "epochs", "rate_per_s": 0.5, "eta_s": 2.0, "source": "line"}
    live_run(runs, progress={**progress, "at_s": NOW_S - waited_s})
    assert f"  progress:   2 of 3 epochs (67 %), 0.5 epochs/s, {words}" in lines_of()


def test_what_is_complete_has_no_time_left(runs: Path) -> None:
    live_run(runs, progress={"done": 3, "total": 3, "unit": "epochs", "eta_s": 0.0, "source": "line", "at_s": NOW_S})
    assert "  progress:   3 of 3 epochs (100 %)" in lines_of()


def test_a_known_checkpoint_bounds_the_loss(runs: Path) -> None:
    live_run(runs, checkpoint={"path": "out/checkpoint-1000", "at_s": NOW_S - 250})
    assert "  at risk:    4 min 10 s, since checkpoint out/checkpoint-1000" in lines_of()


def test_a_session_tells_both_bounds_and_its_own_progress(runs: Path) -> None:
    run = live_run(runs, progress={"done": 1, "total": 2})
    bounds = {"process_s": 41.0, "machine_s": 360.0, "note": "last upload, unconfirmed"}
    session = {"phase": "train", "done": 30, "total": 100, "unit": "steps", "loss_bounds": bounds}
    atomic.write_json(run.session_file(), session)
    lines = lines_of()
    assert "  progress:   train, 30 of 100 steps (30 %)" in lines
    assert "  at risk:    41 s; if the machine is lost, 6 min (last upload, unconfirmed)" in lines
    atomic.write_json(run.session_file(), {"loss_bounds": {"process_s": 41.0, "machine_s": None}})
    assert "  at risk:    41 s (no off-machine copy)" in lines_of()


def test_a_session_tells_epoch_batch_best_and_how_old_the_last_checkpoint_is(runs: Path) -> None:
    run = live_run(runs)
    place = {"epoch": 2, "epochs": 50, "batch": 34, "num_batches": 437}
    best = {"name": "val_spearman", "value": 0.62134, "step": 400}
    newest = {"step": 460, "at_s": NOW_S - 126, "path": "x"}
    session = {"done": 471, "total": 21_850, "place": place, "best": best, "last_checkpoint": newest}
    atomic.write_json(run.session_file(), session)
    lines = lines_of()
    assert "  epoch:      2 of 50, batch 34 of 437 (8 %)" in lines
    assert "  best:       val_spearman 0.6213 at step 400" in lines
    assert "  saved:      2 min 6 s ago, at step 460" in lines
    atomic.write_json(run.session_file(), {**session, "place": {**place, "epochs": None}})
    assert "  epoch:      2, batch 34 of 437 (8 %)" in lines_of()


@pytest.mark.parametrize("wrong", [None, 3, "x", [], {"epoch": "x"}, {"epoch": 1, "batch": 5, "num_batches": None}])
def test_what_a_session_does_not_know_of_its_place_is_left_out(wrong: object, runs: Path) -> None:
    run = live_run(runs)
    atomic.write_json(run.session_file(), {"done": 1, "place": wrong, "best": wrong, "last_checkpoint": wrong})
    assert not [line for line in lines_of() if line.startswith(("  epoch:", "  best:", "  saved:"))]


def test_the_last_numbers_are_shown_the_loss_first_and_what_part_of_a_step_is_under_way(runs: Path) -> None:
    run = live_run(runs)
    numbers = {"lr": 2e-4, "grad_norm": 0.81, "loss": 3.25, "gate_max": 0.4, "gate_entropy": 1.09}
    atomic.write_json(run.session_file(), {"done": 3, "metrics": numbers, "doing": "backward 3 of 16"})
    lines = lines_of()
    assert "  numbers:    loss 3.25, lr 0.0002, grad_norm 0.81, gate_max 0.4, ..." in lines
    assert "  now:        backward 3 of 16" in lines


def test_a_stuck_run_points_to_why(runs: Path) -> None:
    verdict = {"kind": "STUCK", "for_s": 290.0, "text": "waits for a lock at train.py:17"}
    live_run(runs, verdict=verdict, incidents=[{"number": n, "path": f"i-{n}", "text": "stuck"} for n in range(1, 6)])
    lines = lines_of()
    assert "  verdict:    STUCK for 4 min 50 s: waits for a lock at train.py:17" in lines
    assert "  incidents:  5, the last 3:" in lines
    assert "  incident:   stuck: i-5" in lines
    assert lines[-1] == "hint: `jackline why train-1` shows where, with the stacks of every process"


def test_a_stuck_run_has_no_pace_and_no_time_left_and_says_what_the_hang_cost(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = {"kind": "STUCK", "for_s": 290.0, "text": "waits for a lock at train.py:17"}
    progress = {
        "done": 300.0,
        "total": 2000.0,
        "unit": "steps",
        "rate_per_s": 38.0,
        "eta_s": 45.0,
        "at_s": NOW_S - 300,
    }
    run = live_run(runs, verdict=verdict, progress=progress, started_at_s=NOW_S - 1000)
    last = run.last_attempt()
    assert last is not None
    started = json.loads(last.start_file.read_text())
    last.start_file.write_text(json.dumps({**started, "started_at_s": NOW_S - 1000}))
    moments = [(NOW_S - 1000 + at_s, "PROGRESS") for at_s in range(0, 700, 60)]
    moments += [(NOW_S - 300 + at_s, "STUCK") for at_s in range(0, 300, 60)]
    lines = [{"at_s": at_s, "attempt": 1, "verdict": verdict} for at_s, verdict in moments]
    run.timeline.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("JACKLINE_PRICE", "3.6/h")
    said = lines_of()
    assert "  progress:   300 of 2,000 steps (15 %) (5 min ago)" in said
    (goodput,) = [line for line in said if "goodput:" in line]
    assert goodput == (
        "  goodput:    70 % of 16 min 40 s was productive; hang cost 30 %: `jackline why` tells what "
        "it waited for; --on-stuck restart helps where that comes from outside; cost: 1.00, of which 0.30 was not "
        "productive"
    )
    monkeypatch.setenv("JACKLINE_PRICE", "much")  # a price that is none must not hide how the run is
    assert lines_of()[0].startswith("train-1: alive")


def test_a_stale_heartbeat_is_said_as_stale(runs: Path) -> None:
    live_run(runs, at_s=NOW_S - 120)
    assert lines_of()[0] == (
        "train-1: alive, attempt 1, for 41 min; stale: no heartbeat since 21:18:00 UTC (2 min ago), though its "
        "supervisor lives"
    )


def test_a_run_without_a_supervisor_is_alive_but_unwatched(runs: Path) -> None:
    run = live_run(runs)
    write_state(run, gone_process(), at_s=NOW_S - 720, now={"what": "stepping"})
    lines = lines_of()
    assert lines[0] == (
        f"train-1: alive in attempt 1, but unwatched: its supervisor (pid {os.getpid()}) is gone, no heartbeat since "
        "21:08:00 UTC (12 min ago)"
    )
    assert lines[1] == "  last seen:  12 min ago; what follows was true then"
    assert lines[-1] == "hint: `jackline watch train-1` takes over and watches it again"


def test_a_paused_run_says_since_when_and_how_to_continue_it(runs: Path) -> None:
    text = "paused (SIGSTOP): the main process (pid 7) at train.py:3 `step()`; `kill -CONT 7` continues it"
    live_run(runs, verdict={"kind": "PAUSED", "label": "STOPPED", "for_s": 180.0, "text": text, "pid": 7})
    lines = lines_of("train-1")
    assert lines[0] == "train-1: alive, attempt 1, for 41 min; paused (SIGSTOP) since 21:17:00 UTC (3 min ago)"
    assert lines[-1] == ("hint: `kill -CONT 7` continues it; `jackline stop train-1` continues it, saves and ends it")


SAVES = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_paused_plain_command_is_called_paused_and_a_stop_lets_it_save(runs: Path, tmp_path: Path) -> None:
    run = make_run(runs / "plain")
    child = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JACKLINE_RUN_DIR": str(run.path)},
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "training\n"
        run.attempt(1).path.mkdir(parents=True)
        write_bare_start(run.attempt(1), StartRecord(identify(child.pid), started_at_s=NOW_S, is_bare=True))
        atomic.write_json(run.session_file(), {"at_s": NOW_S - 60})
        assert lines_of("plain")[0] == "plain: alive in attempt 1, started without a supervisor"
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: read_state(child.pid) == "T", "the pause")
        lines = lines_of("plain")
        assert lines[0] == (
            "plain: alive in attempt 1, started without a supervisor; paused (SIGSTOP) since 21:19:00 UTC (1 min ago)"
        )
        assert lines[-1].startswith(f"hint: `kill -CONT {child.pid}` continues it; ")
        known = identify(child.pid)  # now: it may have ended when request_stop returns
        assert request_stop(run, by="a test") == known
        assert child.wait(HANGS_S) == 75
        assert (tmp_path / "saved").exists()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_a_run_between_attempts_says_when_it_continues(runs: Path) -> None:
    live_run(runs, is_restarting=True, restart_at_s=NOW_S + 40)
    assert lines_of()[0] == "train-1: alive, between attempts: attempt 2 starts in 40 s"


def test_a_run_elsewhere_is_unknown(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, foreign_process())
    write_state(run, foreign_process(), at_s=NOW_S - 120)
    lines = lines_of()
    assert lines[0] == (
        "train-1: unknown from here: it was last seen 21:18:00 UTC (2 min ago) on host 'gpu-box', in attempt 1"
    )
    assert not [line for line in lines if "at risk" in line]


def test_a_run_elsewhere_with_a_fresh_heartbeat_is_alive_there(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, foreign_process())
    write_state(run, foreign_process(), at_s=NOW_S - 20)
    lines = lines_of()
    assert lines[0] == "train-1: alive on host 'gpu-box' 20 s ago, attempt 1"
    assert [line for line in lines if "at risk" in line]


def test_a_run_that_vanished_is_dead_without_a_guess(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, gone_process())
    write_state(run, gone_process(), at_s=NOW_S - 60)
    assert lines_of()[0] == (
        f"train-1: gone in attempt 1: no heartbeat since 21:19:00 UTC (1 min ago), pid {os.getpid()} is gone; "
        "nobody saw how it ended"
    )


def test_a_run_that_never_started_says_so(runs: Path) -> None:
    make_run(runs / "train-1")
    assert lines_of() == [
        "train-1: created, but never started",
        f"  log:        {runs}/train-1/out.log; there is no log",
        "  command:    python train.py",
    ]


def test_a_silent_log_is_explained(runs: Path) -> None:
    run = live_run(runs)
    run.out_log.write_text("")
    assert lines_of()[-2] == (
        f"  log:        {runs}/train-1/out.log, 0 B; empty after 41 min; programs that are not "
        "Python may keep their output back off a terminal (--tty)"
    )
    run.out_log.write_text("2026-11-15T02:18:34Z UserWarning: x\n2026-11-15T02:18:35Z [jackline] silent for 2 s\n")
    assert lines_of()[-2].endswith("; nothing but warnings so far (1 line)")


STOPPED = "stopped: by Ctrl-C\nhint: run the same command again, or `jackline resume`, to continue"


def test_the_end_is_told_with_its_explanation(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, gone_process())
    write_exit(run, 75, is_stopped=True, ended_at_s=NOW_S - 60, duration_s=2460, text=STOPPED)
    assert lines_of() == [
        "train-1: stopped 1 min ago in attempt 1, after 41 min",
        "  stopped: by Ctrl-C",
        "  next start: the same command again; Jackline knows no checkpoints of it",
        f"  log:        {runs}/train-1/out.log; there is no log",
        "  command:    python train.py",
        "hint: `jackline resume train-1` starts it again",
    ]


def test_a_rescued_state_is_named_where_the_next_start_is_told(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, gone_process())
    load = "hint: `jackline rescue train-1 --load` prints the lines that load the rescued state"
    text = f"stopped: by Ctrl-C\n{load}; with them the same command continues"
    write_exit(run, 75, is_stopped=True, ended_at_s=NOW_S - 60, duration_s=2460, text=text)
    write_rescue(run.attempt(1), RescueRecord(pid=7, outcome="saved", path="/x/step-00000012", step=12, at_s=NOW_S))
    assert lines_of()[1:] == [
        "  stopped: by Ctrl-C",
        "  next start: the same command again, which does not load the rescued state of step 12 by itself",
        f"  log:        {runs}/train-1/out.log; there is no log",
        "  command:    python train.py",
        f"{load} of step 12; `jackline resume train-1` starts it again",
    ]


def test_a_finished_run_says_how_far_it_came_and_its_last_numbers(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, gone_process())
    write_exit(run, 0, ended_at_s=NOW_S - 60, duration_s=2460, text="finished after 41 min")
    progress = {"phase": "", "done": 300, "total": 300, "unit": "it", "source": "bar", "at_s": NOW_S - 61}
    printed = [{"name": "loss", "value": 0.5013, "at_s": NOW_S - 61}]
    write_state(run, gone_process(), at_s=NOW_S - 60, attempt=1, progress=progress, printed=printed)
    assert lines_of()[:3] == [
        "train-1: finished 1 min ago in attempt 1, after 41 min",
        "  progress:   300 of 300 steps (100 %)",
        "  numbers:    loss 0.5013",
    ]
    write_state(
        run, gone_process(), at_s=NOW_S - 60, progress={**progress, "total": None, "unit": "epochs", "source": "line"}
    )
    assert lines_of()[1] == "  progress:   epoch 300"


def test_a_finished_run_says_so_once(runs: Path) -> None:
    run = make_run(runs / "train-1")
    write_start(run, gone_process())
    text = "finished after 41 min\n       peak memory 3.0 GiB of 8.0 GiB RAM"
    write_exit(run, 0, ended_at_s=NOW_S - 60, duration_s=2460, text=text)
    assert lines_of()[:3] == [
        "train-1: finished 1 min ago in attempt 1, after 41 min",
        "  peak memory 3.0 GiB of 8.0 GiB RAM",
        f"  log:        {runs}/train-1/out.log; there is no log",
    ]


def test_a_damaged_run_json_does_not_hide_the_rest(runs: Path) -> None:
    run = live_run(runs)
    run.run_file.write_text("{")
    lines = lines_of("train-1")
    assert lines[:2] == [
        "train-1: alive, attempt 1, for 41 min",
        f"  damaged:    {runs}/train-1/run.json is damaged: it is not JSON",
    ]


DANGEROUS = "\x1b[2J\u202eevil\x07"


def test_nothing_a_run_wrote_reaches_the_terminal_raw(runs: Path) -> None:
    run = live_run(
        runs,
        progress={"phase": DANGEROUS, "done": 1, "total": 2, "unit": DANGEROUS},
        now={"what": DANGEROUS, "file": DANGEROUS, "line": DANGEROUS, "function": DANGEROUS, "source": DANGEROUS},
        verdict={"kind": DANGEROUS, "text": DANGEROUS},
        memory={"used_bytes": 1, "limit_bytes": 2, "limit_source": DANGEROUS},
        gpu=[{"name": DANGEROUS}],
        incidents=[{"text": DANGEROUS, "path": DANGEROUS}],
        protections_off=[DANGEROUS],
        checkpoint={"path": DANGEROUS, "at_s": 1},
    )
    write_exit(run, 1, text=DANGEROUS)
    contents = json.loads(run.run_file.read_text())
    run.run_file.write_text(json.dumps({**contents, "name": DANGEROUS, "argv": [DANGEROUS]}))
    write_state(run, gone_process(), incidents=[{"text": DANGEROUS}])
    dead = status("train-1").output
    live_run(runs, incidents=[{"text": DANGEROUS, "path": DANGEROUS}], now={"what": DANGEROUS})
    for text in (dead, status("train-1").output):
        assert "evil" in text
        assert not set(text) & set("\x1b\u202e\x07")


@pytest.mark.parametrize("value", [None, 7, "text", [], {}, [None], {"at_s": "x"}, float("nan"), True])
def test_values_of_the_wrong_kind_count_as_absent(runs: Path, value: Any) -> None:
    names = ("progress", "now", "verdict", "memory", "gpu", "incidents", "protections_off", "checkpoint", "output")
    run = live_run(runs, **dict.fromkeys((*names, "started_at_s", "silent_s", "cpu_cores", "restart_at_s"), value))
    atomic.write_json(run.session_file(), {"done": value, "loss_bounds": value, "phase": value})
    assert lines_of()[0].startswith("train-1: alive, attempt 1")
    assert json.loads(status("--json").output)["state"] == "alive"


def test_json_holds_the_judged_state_and_the_raw_numbers(runs: Path) -> None:
    live_run(runs, progress={"done": 1200, "total": 5000})
    value = json.loads(status("train-1", "--json").output)
    assert (value["name"], value["state"], value["attempt"], value["is_stale"]) == ("train-1", "alive", 1, False)
    assert (value["progress"]["done"], value["progress"]["total"]) == (1200, 5000)
    assert value["log"]["verdict"] == "growing"
    assert value["loss"].startswith("everything since the start")
    assert value["supervisor"]["silent_s"] == 3.0


def test_an_unknown_run_is_a_usage_error(runs: Path) -> None:
    result = status("nothing")
    assert isinstance(result.exception, UsageError) and result.exception.exit_code == 2


QUICK = """
import sys
from tests.counted import count_calls

def ask():
    sys.argv = ['jackline', 'status', '--json']
    from jackline.cli.main import main
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code

number = count_calls(ask)
heavy = {'torch', 'numpy', 'rich', 'pydantic', 'asyncio', 'multiprocessing', 'email', 'http', 'subprocess'}
print(sorted(heavy & set(sys.modules)), number, file=sys.stderr)
"""


def test_the_command_loads_nothing_heavy_and_makes_at_most_100_000_calls(runs: Path) -> None:
    """Imports included. Counted, not timed, because other work on the machine must not decide; that this is less than
    150 ms of CPU on an idle one is bench/supervisor.py's to measure."""
    live_run(runs)
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, timeout=HANGS_S, cwd=ROOT)
    assert json.loads(done.stdout)["state"] == "alive"
    loaded, number = done.stderr.strip().rsplit(" ", 1)
    assert loaded == "[]"
    assert int(number) <= 100_000


def curve_files(run: RunDir, *, event_age_s: float, metrics_age_s: float) -> None:
    run.tensorboard.mkdir()
    for path, age_s in (
        (run.tensorboard / "events.out.tfevents.1.host.1.0", event_age_s),
        (run.metrics(0), metrics_age_s),
    ):
        path.write_bytes(b"x")
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))


def test_curves_that_are_not_this_attempts_are_flagged(runs: Path) -> None:
    run = live_run(runs)
    curve_files(run, event_age_s=9000, metrics_age_s=5)
    line = (
        "  curves:     TensorBoard's files are 2 h 29 min behind the run's own numbers, from before this attempt"
        " began: its curves are not what runs now"
    )
    assert line in lines_of("train-1")
    value = json.loads(status("--json").output)["curves"]
    assert value["text"] == line.removeprefix("  curves:     ")
    assert value["event_file_at_s"] == NOW_S - 9000


def test_curves_that_stopped_are_flagged_and_good_or_missing_ones_are_not(runs: Path) -> None:
    run = live_run(runs)
    assert not any("TensorBoard" in line for line in lines_of("train-1"))
    curve_files(run, event_age_s=60, metrics_age_s=5)
    assert not any("TensorBoard" in line for line in lines_of("train-1"))
    os.utime(run.metrics(0), (NOW_S + 900, NOW_S + 900))
    text = "TensorBoard's files are 16 min behind the run's own numbers: its curves have stopped"
    assert f"  curves:     {text}" in lines_of("train-1")


def test_branch_commit_and_gpus_of_the_run_are_shown(runs: Path) -> None:
    git = {"commit": "0123456789abcdef", "branch": "fix-\x1b[31mloss", "is_dirty": True}
    machine = {"num_cpus": 8, "cards": ["NVIDIA H200", "NVIDIA H200", "Tesla T4"], "card_bytes": [140 * GIB] * 2}
    run = make_run(runs / "train-1", git=git, machine=machine)
    write_exit(run, 0)
    assert [line for line in lines_of("train-1") if line.startswith(("  code:", "  gpus:"))] == [
        "  code:       branch fix-loss, commit 0123456789ab, with uncommitted changes",
        "  gpus:       2 x NVIDIA H200 (140 GiB), Tesla T4",
    ]
    found = json.loads("\n".join(lines_of("train-1", "--json")))
    assert (found["git"], found["machine"]) == (git, machine)


@pytest.mark.parametrize("machine", [{}, {"cards": [], "card_bytes": []}, {"cards": "no list", "card_bytes": 3}])
def test_without_gpus_or_a_repository_nothing_is_said_of_them(runs: Path, machine: dict[str, Any]) -> None:
    write_exit(make_run(runs / "train-1", machine=machine), 0)
    assert not [line for line in lines_of("train-1") if line.startswith(("  code:", "  gpus:"))]

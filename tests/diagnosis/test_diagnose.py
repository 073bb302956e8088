"""Why did it die? Real programs are run to their end; messages that need a GPU are quoted."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, SentSignal
from jackline.diagnosis.deaths.report import death_text
from jackline.diagnosis.frames import Frame
from tests.diagnosis.deaths import GIB, best, evidence, run_command, run_script, said

GROWING = Frame("load", "/home/me/data.py", 42, "rows.append(parse(line))", True)


def text_of(found: Evidence) -> str:
    return death_text(diagnose(found), found)


def sent(number: int, why: str) -> SentSignal:
    return SentSignal(1_799_999_999.0, number, why)


# -- what we did ourselves -------------------------------------------------------------------------------------------


def test_ctrl_c_is_told_as_a_stop() -> None:
    found = evidence(signal=signal.SIGINT, sent_signals=(sent(2, "ctrl-c"),), stop_requested_by="Ctrl-C")
    assert text_of(found) == (
        "stopped by Ctrl-C after 41 s\n"
        "       it ended on SIGINT\n"
        "       peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: run the same command again, or `jackline resume`, to continue"
    )
    assert not best(found).is_retryable


@pytest.mark.parametrize("why", ["ctrl-c", "stop", "time-limit"])
def test_a_script_whose_state_was_rescued_does_not_continue_by_itself(why: str) -> None:
    command = "jackline rescue 'my run' --load"
    found = evidence(
        signal=signal.SIGTERM, sent_signals=(sent(15, why),), stop_requested_by="Ctrl-C", rescued=command
    )
    hint = f"`{command}` prints the lines that load the rescued state; with them the same command continues"
    assert best(found).hint == hint


def test_a_stop_that_needed_sigkill_says_so() -> None:
    signals = (sent(15, "stop"), sent(15, "stop"), sent(9, "stop"))
    found = evidence(signal=9, sent_signals=signals, stop_requested_by="jackline stop")
    assert best(found).title == "stopped by `jackline stop` after 41 s"
    assert best(found).detail[0] == "it did not end when asked to and was killed (SIGKILL)"


def test_sigterm_to_the_supervisor_names_who_it_can_have_been() -> None:
    found = evidence(signal=15, sent_signals=(sent(15, "sigterm"),), stop_requested_by="SIGTERM to the supervisor")
    assert best(found).cause == "stopped"
    assert best(found).title == (
        "stopped by SIGTERM to the supervisor (a shutdown, a preemption or a person) after 41 s"
    )


def test_a_session_that_leaves_by_itself_after_a_request_was_stopped() -> None:
    found = evidence(exit_code=75, stop_requested_by="jackline stop")
    assert (best(found).cause, best(found).title) == ("stopped", "stopped by `jackline stop` after 41 s")


def test_an_error_while_stopping_is_told_beside_the_stop(tmp_path: Path) -> None:
    code = "raise OSError(28, 'No space left on device', '/mnt/out/last.pt')"
    found = run_script(tmp_path, code, sent_signals=(sent(15, "stop"),), stop_requested_by="jackline stop")
    assert [finding.cause for finding in diagnose(found)] == ["stopped", "disk_full"]
    assert "       also: the disk is full at train.py:1: it could not write /mnt/out/last.pt\n" in text_of(found)


def test_the_time_limit_is_told_as_such() -> None:
    found = evidence(signal=15, sent_signals=(sent(15, "time-limit"),), stop_requested_by="time limit")
    assert best(found).cause == "time_limit"
    assert best(found).title == "ended by Jackline after 41 s: the time limit was reached"


def test_an_end_for_being_stuck_names_the_line_and_is_retried() -> None:
    frame = Frame("wait", "/home/me/train.py", 7, "lock.acquire()", True)
    found = evidence(signal=15, sent_signals=(sent(15, "stuck"),), last_frame=frame)
    assert text_of(found) == (
        "error: ended by Jackline after 41 s: it was stuck at train.py:7\n"
        "       /home/me/train.py:7 in wait: lock.acquire()\n"
        "       it ended on SIGTERM\n"
        "hint: `jackline why` shows the stacks of every process from when it hung"
    )
    assert best(found).is_retryable and best(found).place == frame


def test_the_memory_guard_names_the_line_that_grew_and_is_not_retried() -> None:
    found = evidence(
        signal=15,
        sent_signals=(sent(15, "memory"),),
        peak_memory_bytes=int(7.8 * GIB),
        growing_frame=GROWING,
        memory_growth_bytes_per_s=210 * 2**20,
    )
    assert text_of(found) == (
        "error: ended by Jackline after 41 s, before the kernel would have killed it for memory\n"
        "       peak memory 7.8 GiB of 8.0 GiB RAM\n"
        "       it was growing by 210 MiB/s in /home/me/data.py:42 in load: rows.append(parse(line))\n"
        "       it ended on SIGTERM\n"
        "hint: host RAM, not GPU memory, grew at data.py:42: keep less there (free it, bound it, or write it to "
        "disk); a smaller batch does not stop a growth"
    )
    assert not best(found).is_retryable


def test_cleaning_up_after_a_crash_is_not_a_reason_of_its_own() -> None:
    found = evidence(signal=signal.SIGSEGV, sent_signals=(sent(9, "clean-up"),))
    assert best(found).cause == "segfault"


def test_a_kernel_kill_during_our_polite_stop_is_the_kernels() -> None:
    found = evidence(signal=9, sent_signals=(sent(2, "ctrl-c"),), stop_requested_by="Ctrl-C", oom_kills_in_cgroup=1)
    assert best(found).cause == "kernel_oom"


# -- the kernel's and somebody's SIGKILL -----------------------------------------------------------------------------


def test_a_kernel_kill_is_certain_when_the_cgroup_counted_it_and_memory_was_full() -> None:
    found = evidence(
        signal=9,
        oom_kills_in_cgroup=1,
        oom_kills_on_machine=1,
        peak_memory_bytes=8 * GIB,
        memory_limit_source="cgroup /job",
        growing_frame=GROWING,
        memory_growth_bytes_per_s=200e6,
        kernel_log=("Memory cgroup out of memory: Killed process 4242 (python) total-vm:9000000kB",),
        tree_pids=(4242,),
    )
    assert text_of(found) == (
        "error: the kernel killed it because memory ran out: the limit is 8.0 GiB\n"
        "       peak memory 8.0 GiB of 8.0 GiB (cgroup /job)\n"
        "       it was growing by 191 MiB/s in /home/me/data.py:42 in load: rows.append(parse(line))\n"
        "       the kernel counted 1 out-of-memory kill in its memory cgroup during this attempt\n"
        "       kernel log: Memory cgroup out of memory: Killed process 4242 (python) total-vm:9000000kB\n"
        "hint: host RAM, not GPU memory, grew at data.py:42: keep less there (free it, bound it, or write it to "
        "disk); a smaller batch does not stop a growth"
    )
    assert (best(found).confidence, best(found).is_retryable) == ("certain", False)


def test_a_kill_that_only_the_machine_counted_is_likely_where_no_cgroup_counts() -> None:
    found = evidence(signal=9, oom_kills_in_cgroup=None, oom_kills_on_machine=2)
    assert (best(found).cause, best(found).confidence) == ("kernel_oom", "likely")
    assert "the kernel counted 2 out-of-memory kills on this machine during this attempt" in best(found).detail


def test_a_kill_elsewhere_on_the_machine_leaves_doubt() -> None:
    found = evidence(signal=9, oom_kills_in_cgroup=0, oom_kills_on_machine=1)
    assert [(finding.cause, finding.confidence) for finding in diagnose(found)] == [
        ("killed_by_someone", "not sure"),
        ("kernel_oom", "not sure"),
    ]


def test_a_kill_elsewhere_on_the_machine_while_ours_was_full_speaks_for_the_kernel() -> None:
    found = evidence(signal=9, oom_kills_in_cgroup=0, oom_kills_on_machine=1, peak_memory_bytes=8 * GIB)
    assert [finding.cause for finding in diagnose(found)] == ["kernel_oom", "killed_by_someone"]


def test_sigkill_that_nobody_counted_was_somebody(tmp_path: Path) -> None:
    found = run_script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert text_of(found) == (
        "error: killed with SIGKILL (kill -9) by someone else (likely)\n"
        "       Jackline did not send it, and the kernel counted no out-of-memory kill\n"
        "       it ran for 41 s; peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: ask who or what ends processes here: a colleague, a scheduler, a container's limits"
    )
    assert (best(found).confidence, best(found).is_retryable) == ("likely", False)


def test_sigkill_with_full_memory_and_unreadable_counters_is_not_sure() -> None:
    found = evidence(
        signal=9,
        oom_kills_in_cgroup=None,
        oom_kills_on_machine=None,
        peak_memory_bytes=int(7.6 * GIB),
        growing_frame=GROWING,
    )
    assert text_of(found) == (
        "error: killed with SIGKILL (kill -9) by someone else (not sure)\n"
        "       Jackline did not send it; the kernel's out-of-memory counters could not be read here\n"
        "       it ran for 41 s; peak memory 7.6 GiB of 8.0 GiB RAM\n"
        "       it was growing in /home/me/data.py:42 in load: rows.append(parse(line))\n"
        "       a memory daemon (systemd-oomd, earlyoom) may have done it: memory was nearly full\n"
        "       or: the kernel may have killed it because memory ran out; its counters could not be read here"
        " (not sure)\n"
        "hint: host RAM, not GPU memory, grew at data.py:42: keep less there (free it, bound it, or write it to "
        "disk); a smaller batch does not stop a growth"
    )


def test_sigkill_with_unreadable_counters_and_little_memory_is_likely_somebody() -> None:
    found = evidence(signal=9, oom_kills_in_cgroup=None, oom_kills_on_machine=None)
    assert [(finding.cause, finding.confidence) for finding in diagnose(found)] == [("killed_by_someone", "likely")]


# -- other signals ---------------------------------------------------------------------------------------------------


def test_sigterm_from_outside_may_be_a_preemption_or_a_person(tmp_path: Path) -> None:
    found = run_script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert text_of(found) == (
        "error: ended by SIGTERM, which Jackline did not send: a preemption, a shutdown or a person's `kill`"
        " (not sure)\n"
        "       it ran for 41 s; peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: run the same command again, or `jackline resume`, to continue"
    )
    assert (best(found).cause, best(found).is_retryable) == ("preempted", False)


def test_a_shutdown_that_reached_command_and_supervisor_alike_is_a_stop() -> None:
    found = evidence(signal=15, stop_requested_by="SIGTERM to the supervisor")
    assert text_of(found).splitlines()[0] == (
        "stopped by SIGTERM to the supervisor (a shutdown, a preemption or a person) after 41 s"
    )


def test_a_keyboard_interrupt_that_we_did_not_send_is_somebodys(tmp_path: Path) -> None:
    found = run_script(tmp_path, "raise KeyboardInterrupt")
    assert found.signal == signal.SIGINT
    assert (best(found).cause, best(found).is_retryable) == ("killed_by_someone", False)
    assert best(found).title == "interrupted with SIGINT (Ctrl-C) by someone, not through Jackline"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGHUP, "its terminal was closed, or somebody sent SIGHUP"),
        (signal.SIGILL, "it ran an instruction this CPU does not have"),
        (signal.SIGXCPU, "it used up its CPU time (ulimit -t)"),
        (signal.SIGUSR1, "it has no handler for SIGUSR1, which Slurm sends before the end"),
    ],
)
def test_rare_signals_are_explained(number: signal.Signals, words: str) -> None:
    found = best(evidence(signal=int(number)))
    assert found.cause == "other_signal"
    assert found.title == f"ended by {number.name}, which Jackline did not send: {words}"
    assert found.hint


def test_a_signal_without_a_name_is_named_by_its_number() -> None:
    assert best(evidence(signal=40)).title == "ended by signal 40, which Jackline did not send"


FAULT = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/me/helper.py", line 5 in poll

Current thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/train.py", line 9 in kernel
    ctypes.string_at(0)
  File "/home/me/train.py", line 14 in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""


def test_a_segfault_is_placed_in_the_thread_that_crashed() -> None:
    found = evidence(signal=11, fault_text=FAULT)
    assert text_of(found) == (
        "error: it crashed in native code with a segmentation fault at train.py:9\n"
        "       /home/me/train.py:9 in kernel: ctypes.string_at(0)\n"
        "       it ran for 41 s; peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: that line calls C through ctypes: look at the address it passes (null, freed), at argtypes and "
        "restype, and that what it points to still lives"
    )
    assert best(found).is_retryable


def test_a_bus_error_with_a_full_dev_shm_says_so() -> None:
    found = evidence(signal=7, shm_free_bytes=0)
    assert text_of(found) == (
        "error: it crashed with a bus error: /dev/shm is full\n"
        "       /dev/shm has 0 B free; DataLoader workers pass batches through it\n"
        "       it ran for 41 s; peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: use fewer workers, or a larger /dev/shm (docker run --shm-size=8g)"
    )


def test_a_bus_error_on_a_full_disk_says_so() -> None:
    found = best(evidence(signal=7, shm_free_bytes=GIB, disk_free_bytes=100, disk_path="/mnt/out"))
    assert found.title == "it crashed with a bus error: the disk of /mnt/out is full"


def test_an_abort_tells_what_was_said_last(tmp_path: Path) -> None:
    found = run_script(tmp_path, "import os\nprint('double free or corruption', flush=True)\nos.abort()")
    assert best(found).cause == "abort"
    assert best(found).detail[0] == "it said last: double free or corruption"


def test_an_abort_after_a_cuda_error_is_the_cuda_error() -> None:
    text = """
        terminate called after throwing an instance of 'c10::AcceleratorError'
          what():  CUDA error: unspecified launch failure
    """
    found = said(text, exit_code=None, signal=6)
    assert [finding.cause for finding in diagnose(found)] == ["cuda_error", "abort"]
    assert best(found).is_retryable


def test_an_abort_of_the_nccl_watchdog_names_rank_operation_and_wait() -> None:
    text = (
        "[rank1]:[E1115 10:00:00.0 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 "
        "milliseconds before timing out."
    )
    found = said(text, exit_code=None, signal=6)
    assert best(found).cause == "nccl_timeout"
    assert (
        best(found).title == "rank 1 waited for 600 s in ALLREDUCE for another rank that never came (NCCL watchdog)"
    )
    assert best(found).is_retryable


def test_a_death_inside_a_shell_is_found_in_its_exit_code(tmp_path: Path) -> None:
    found = run_command(
        ["sh", "-c", f"{sys.executable} -c 'import os; os.kill(os.getpid(), 9)'; exit $?"], cwd=tmp_path
    )
    assert found.exit_code == 137
    assert text_of(found) == (
        "error: killed with SIGKILL (kill -9) by someone else (likely)\n"
        "       exit code 137 = 128 + 9: a process inside it ended by SIGKILL\n"
        "       Jackline did not send it, and the kernel counted no out-of-memory kill\n"
        "       it ran for 41 s; peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: ask who or what ends processes here: a colleague, a scheduler, a container's limits"
    )


@pytest.mark.parametrize(
    ("code", "cause"), [(139, "segfault"), (134, "abort"), (143, "preempted"), (130, "killed_by_someone")]
)
def test_other_deaths_inside_a_shell_are_likely_at_most(code: int, cause: str) -> None:
    found = best(evidence(exit_code=code))
    assert found.cause == cause
    assert found.confidence != "certain"


def test_a_kernel_kill_inside_a_shell_is_found() -> None:
    assert best(evidence(exit_code=137, oom_kills_in_cgroup=1)).cause == "kernel_oom"


# -- ends nobody saw and good ends -----------------------------------------------------------------------------------


def test_an_end_nobody_saw_is_not_guessed() -> None:
    found = evidence(output_tail=("epoch 3",))
    assert text_of(found) == (
        "error: it is gone and nobody saw how it ended (not sure)\n"
        "       its last line: epoch 3\n"
        "       it was last seen alive after 41 s\n"
        "       peak memory 3.0 GiB of 8.0 GiB RAM\n"
        "hint: a lost machine or a killed supervisor does that; run the same command again to continue"
    )


def test_an_end_nobody_saw_but_the_kernel_counted_is_the_kernels() -> None:
    assert [finding.cause for finding in diagnose(evidence(oom_kills_in_cgroup=1))] == ["kernel_oom", "unknown"]


def test_a_good_end_is_told_in_two_lines() -> None:
    found = evidence(exit_code=0, duration_s=11520)
    assert text_of(found) == ("finished after 3 h 12 min\n       peak memory 3.0 GiB of 8.0 GiB RAM")


@pytest.mark.parametrize(
    "line",
    [
        "[rank: 0] Received SIGTERM: 15",
        "SIGTERM received, saving and leaving",
        "WARNING Received Signals.SIGTERM death signal, shutting down workers",
        "Signal handler called with signal 15",
        "caught signal SIGUSR1 on host gpu-3",
        "Exiting because of SIGTERM",
        "Handling auto-requeue signal: 10",
    ],
)
def test_exit_code_0_after_a_signal_is_a_stop_and_not_the_end(line: str) -> None:
    """A Lightning run that a preemption ended counted as finished, and `resume` refused to continue it."""
    found = evidence(exit_code=0, output_tail=("step 3/9", line, "", "Epoch 7/7 3/20 31.14it/s"))
    assert best(found).cause == "stopped"
    assert best(found).detail[0] == f"it printed: {line}"


@pytest.mark.parametrize(
    "line",
    [
        "registered a handler for SIGTERM",
        "will save when SIGTERM is received",
        "SIGTERM handler installed",
        "loss 0.3 at signal 15.2 dB",
        "*** SIGTERM received at time=1690000000 on cpu 3 ***",
        "(raylet) received SIGTERM, exiting",
    ],
)
def test_words_about_signals_to_come_do_not_make_an_end_a_stop(line: str) -> None:
    assert best(evidence(exit_code=0, output_tail=(line, "step 9/9"))).cause == "finished"


def test_progress_decides_whether_a_signal_ended_it() -> None:
    lines = ("SIGTERM received", "a", "b", "c", "d")
    causes = [best(evidence(exit_code=0, output_tail=lines, is_incomplete=one)).cause for one in (True, None, False)]
    assert causes == ["stopped", "finished", "finished"]
    near = evidence(exit_code=0, output_tail=lines[:1], is_incomplete=False)
    assert best(near).cause == "finished"


def test_a_traceback_printed_along_the_way_does_not_spoil_a_good_end(tmp_path: Path) -> None:
    code = """
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        print("done")
    """
    assert [finding.cause for finding in diagnose(run_script(tmp_path, code))] == ["finished"]


def test_a_pipe_that_hides_the_exit_code_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('hidden')\n")
    found = run_command(["sh", "-c", f"{sys.executable} bad.py 2>&1 | cat"], cwd=tmp_path)
    assert found.exit_code == 0
    assert [finding.cause for finding in diagnose(found)] == ["finished", "own_exception"]
    assert "      but its output ends with ValueError: hidden\n" in text_of(found)
    assert text_of(found).endswith(
        "hint: a pipe hides the exit code of all but its last program: use `set -o pipefail`"
    )


def test_exit_code_75_is_a_stop_the_script_asked_for(tmp_path: Path) -> None:
    found = run_script(tmp_path, "raise SystemExit(75)")
    assert best(found).cause == "stopped"
    assert best(found).title == "it stopped by itself after 41 s to be resumed (exit code 75)"


@pytest.mark.parametrize("code", [None, 0, 1, 2, 75, 126, 127, 137, 255])
@pytest.mark.parametrize("number", [None, 1, 6, 9, 15, 64])
@pytest.mark.parametrize("tail", [(), ("",), ("Traceback (most recent call last):",)])
def test_there_is_always_a_finding_and_a_text_of_at_most_eight_lines(
    code: int | None, number: int | None, tail: tuple[str, ...]
) -> None:
    found = evidence(exit_code=code, signal=number, output_tail=tail, growing_frame=GROWING, oom_kills_on_machine=1)
    assert 2 <= len(text_of(found).splitlines()) <= 8


def test_evidence_read_back_from_exit_json_is_judged_the_same() -> None:
    found = evidence(signal=9, oom_kills_in_cgroup=1, growing_frame=GROWING, sent_signals=(sent(9, "clean-up"),))
    assert diagnose(Evidence.from_json(found.to_json())) == diagnose(found)


WORDS = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "/home/me/a.py", line 3, in f',
        "    x = 1",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate . GiB.",
        "RuntimeError: DataLoader worker (pid 1, ,) is killed by signal: ?",
        "ImportError: cannot import name",
        "OSError: [Errno 28]",
        "ChildFailedError:",
        "exitcode  : -99999999999 (pid: 3)",
        "process 3 terminated with signal SIGNOTHING",
        "usage: x",
        "x: error: y",
        "Watchdog caught collective operation timeout: WorkNCCL()",
        "CUDA error: ",
        "died with <Signals.SIGKILL: 9>",
    ]
)


@given(
    st.lists(WORDS | st.text(max_size=20), max_size=12),
    st.none() | st.integers(0, 255),
    st.none() | st.integers(1, 64),
    st.text(max_size=60),
)
def test_no_output_whatever_makes_the_judge_fail(
    tail: list[str], code: int | None, number: int | None, fault: str
) -> None:
    found = evidence(exit_code=code, signal=number, output_tail=tuple(tail), fault_text=fault)
    findings = diagnose(found)
    assert findings and all(finding.title for finding in findings)
    assert len(death_text(findings, found).splitlines()) <= 8

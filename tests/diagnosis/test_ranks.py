"""Which rank failed first: from the ranks' own last lines and the launcher's report."""

from __future__ import annotations

import pytest

from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, RankEnd, SentSignal
from jackline.diagnosis.deaths.launcher import LauncherNoise
from jackline.diagnosis.deaths.ranks import own_traceback, read_reports
from jackline.diagnosis.deaths.report import death_text
from jackline.diagnosis.frames import Frame
from jackline.units import rank_words


def traceback(rank: int, error: str, *, line: int = 17, source: str = "step()") -> tuple[str, ...]:
    lines = (
        "Traceback (most recent call last):",
        f'  File "/home/me/train.py", line {line}, in <module>',
        f"    {source}",
        error,
    )
    return tuple(f"[rank{rank}]: {entry}" for entry in lines)


LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
    "[127.0.0.1]:21111"
)
LOG = (
    "W1116 12:00:01.000000 4000 torch/distributed/elastic/multiprocessing/api.py:1029] Sending process 4242 closing "
    "signal SIGTERM",
    "E1116 12:00:01.100000 4000 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: 1) "
    "local_rank: 1 (pid: 4243) of binary: /usr/bin/python",
)


def report(*failed: tuple[int, int], root: tuple[int, int]) -> tuple[str, ...]:
    """What torchrun prints: log lines, its own traceback and a table."""

    def entry(number: int, rank: int, code: int) -> list[str]:
        return [
            f"[{number}]:",
            "  time      : 2026-11-16_12:00:01",
            "  host      : here",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {4242 + rank})",
            "  error_file: <N/A>",
            "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        ]

    others = [line for number, (rank, code) in enumerate(failed, 1) for line in entry(number, rank, code)]
    return (
        *LOG,
        "Traceback (most recent call last):",
        '  File "/venv/bin/torchrun", line 10, in <module>',
        "    sys.exit(main())",
        "             ^^^^^^",
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 990, in main',
        "    run(args)",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "train.py FAILED",
        "------------------------------------------------------------",
        "Failures:",
        *(others or ["  <NO_OTHER_FAILURES>"]),
        "------------------------------------------------------------",
        "Root Cause (first observed failure):",
        *entry(0, *root),
        "============================================================",
    )


def job(
    screen: tuple[str, ...],
    files: dict[int, tuple[str, ...]],
    *,
    size: int = 2,
    frames: dict[int, Frame] | None = None,
) -> Evidence:
    ends = [RankEnd(0, size, 4242)]
    ends += [
        RankEnd(rank, size, 4242 + rank, has_file=True, output_tail=files.get(rank, ()), doing="running step")
        for rank in range(1, size)
    ]
    ends = [
        RankEnd(e.rank, e.world_size, e.pid, e.has_file, e.output_tail, (frames or {}).get(e.rank), e.doing)
        for e in ends
    ]
    return Evidence(exit_code=1, duration_s=9.0, ended_at_s=1.0, output_tail=screen, ranks=tuple(ends))


KINDS = {
    "exception": (
        job((*traceback(0, LOST), *report((0, 1), root=(1, 1))), {1: traceback(1, "ValueError: boo")}),
        "own_exception",
        "rank 1 of 2: ValueError: boo (train.py:17)",
    ),
    "the launcher blames an echo": (
        job((*traceback(0, LOST), *report(root=(0, 1))), {1: traceback(1, "ValueError: boo")}),
        "own_exception",
        "rank 1 of 2: ValueError: boo (train.py:17)",
    ),
    "killed": (job(report(root=(1, -9)), {}), "killed_by_someone", "rank 1 of 2: "),
    "killed, and another rank noticed first": (
        job((*traceback(0, LOST), *report((1, -9), root=(0, 1))), {}),
        "killed_by_someone",
        "rank 1 of 2: ",
    ),
    "out of memory": (
        job(
            report(root=(1, 1)),
            {1: traceback(1, "RuntimeError: [enforce fail] . DefaultCPUAllocator: can't allocate memory: 1 TB")},
        ),
        "host_memory_error",
        "rank 1 of 2: ",
    ),
    "import error": (
        job(
            (*traceback(0, "ModuleNotFoundError: No module named 'wids'"), *report((1, 1), root=(0, 1))),
            {1: traceback(1, "ModuleNotFoundError: No module named 'wids'")},
        ),
        "import_error",
        "rank 0 of 2: ",
    ),
    "assertion": (
        job((*traceback(0, LOST), *report(root=(1, 1))), {1: traceback(1, "AssertionError: loss < 0")}),
        "own_exception",
        "rank 1 of 2: AssertionError: loss < 0 (train.py:17)",
    ),
    "bad shape": (
        job(report(root=(1, 1)), {1: traceback(1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied")}),
        "own_exception",
        "rank 1 of 2: RuntimeError: mat1",
    ),
    "nan": (job(report(root=(1, 1)), {1: ("step 3", "loss is nan, giving up")}), "exit_code", "rank 1 of 2: "),
    "exit code 3": (
        job((*traceback(0, LOST), *report((0, 1), root=(1, 3))), {1: ("step 3",)}),
        "exit_code",
        "rank 1 of 2: ended with exit code 3",
    ),
    "segfault": (job(report(root=(1, -11)), {}), "segfault", "rank 1 of 2: "),
    "missing file": (
        job(
            (*traceback(0, LOST), *report(root=(1, 1))),
            {1: traceback(1, "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'")},
        ),
        "own_exception",
        "rank 1 of 2: FileNotFoundError",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_rank_that_failed_explains_the_job(kind: str) -> None:
    evidence, cause, title = KINDS[kind]
    found = diagnose(evidence)[0]
    assert (found.cause, found.title.startswith(title)) == (cause, True), found.title


def test_a_timeout_in_a_collective_names_the_rank_that_never_came() -> None:
    error = (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms "
        "for recv operation to complete"
    )
    place = Frame("main", "/home/me/train.py", 11, "time.sleep(600)", is_user=True)
    found = diagnose(job((*traceback(0, error), *report(root=(0, 1))), {1: ("step 3",)}, frames={1: place}))[0]
    assert found.title == "rank 0 waited 5 s in <module> for rank 1, which never came"
    assert found.detail[0] == "rank 1 was running step at train.py:11"
    assert found.place == place


def test_a_rank_that_left_early_is_named_and_not_those_that_lost_it() -> None:
    found = diagnose(job((*traceback(0, LOST), *report(root=(0, 1))), {1: ("done",)}))[0]
    assert found.title == "rank 1 ended without an error while rank 0 still waited in a collective at train.py:17"


def test_a_port_that_is_taken_is_named_with_the_option_that_chooses_another() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/venv/bin/torchrun", line 10, in <module>',
        "    sys.exit(main())",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    )
    found = diagnose(Evidence(exit_code=1, duration_s=1.0, ended_at_s=1.0, output_tail=lines))[0]
    assert found.title.startswith("the port 29500 is in use already")
    assert "--master-port" in found.hint


def test_the_same_error_on_all_ranks_is_said_once() -> None:
    found = diagnose(KINDS["import error"][0])[0]
    assert "the same error on ranks 0-1; the first of them is shown" in found.detail


def test_the_traceback_of_a_rank_that_is_not_on_the_screen_is_part_of_the_report() -> None:
    evidence = KINDS["exception"][0]
    text = death_text(diagnose(evidence), evidence)
    assert "  Traceback (most recent call last):\n" in text
    assert "  ValueError: boo\n" in text
    assert own_traceback(KINDS["import error"][0]) == []  # rank 0 is on the screen already


def test_a_stop_of_all_ranks_is_a_stop_of_the_job() -> None:
    found = diagnose(job(report((1, 75), root=(0, 75)), {1: ()}))[0]
    assert found.cause == "stopped"
    assert found.title.startswith("it stopped by itself")


def test_mp_spawn_names_the_process_that_failed() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 30, in <module>',
        "    mp.spawn(main, nprocs=2)",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 3",
    )
    found = diagnose(Evidence(exit_code=1, duration_s=1.0, ended_at_s=1.0, output_tail=lines))[0]
    assert found.title.startswith("rank 1: ended with exit code 3")


def test_the_first_observed_failure_comes_first_in_a_launchers_report() -> None:
    assert [(one.rank, one.code) for one in read_reports(report((0, 1), (2, -15), root=(1, -9)))] == [
        (1, -9),
        (0, 1),
        (2, -15),
    ]


def test_ranks_are_listed_as_ranges() -> None:
    assert rank_words([3]) == "rank 3"
    assert rank_words([5, 0, 1, 2]) == "ranks 0-2, 5"


def shown(lines: tuple[str, ...]) -> tuple[list[str], int]:
    noise = LauncherNoise()
    kept = [line for entry in lines for line in noise.feed(entry)] + noise.release()
    return kept, noise.num_folded


def test_a_launchers_report_is_folded_and_the_ranks_own_lines_stay() -> None:
    own = (*traceback(0, "ValueError: boo"), "step 4")
    kept, count = shown((*own, *report(root=(0, 1)), "after"))
    assert kept == [*own, "after"]
    assert count == len(report(root=(0, 1)))


def test_a_plain_traceback_is_never_folded() -> None:
    lines = tuple(line.removeprefix("[rank0]: ") for line in traceback(0, "ValueError: boo"))
    assert shown(lines) == (list(lines), 0)


def test_an_error_of_the_launcher_itself_is_shown() -> None:
    lines = (*report(root=(0, 1))[2:8], "torch.distributed.DistNetworkError: port: 29500, EADDRINUSE")
    assert shown(lines) == (list(lines), 0)


GLOO_SIZES = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= "
    "op.nbytes. 24 vs 20. Received data size doesn't match expected size.",
)
FAULT = """Fatal Python error: Aborted

Current thread 0x00007f0000000001 (most recent call first):
  <no Python frame>

Thread 0x00007f0000000002 (most recent call first):
  File "/v/site-packages/jackline/supervisor/child/inside/recorder.py", line 58 in _listen

Thread 0x00007f0000000003 (most recent call first):
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 13 in <module>
"""


def test_collectives_of_different_sizes_are_named_at_the_line_of_the_main_thread() -> None:
    ends = (RankEnd(0, 2, 4242, False, GLOO_SIZES), RankEnd(1, 2, 4243, True, traceback(1, LOST)))
    tail = (*GLOO_SIZES, *report((1, 1), root=(0, -6)))
    found = diagnose(Evidence(exit_code=1, duration_s=9.0, output_tail=tail, fault_text=FAULT, ranks=ends))[0]
    assert found.title == (
        "rank 0 of 2: the ranks called a collective with tensors of different sizes at train.py:13"
    )
    assert "another rank sent 24 bytes where 20 were expected" in found.detail


def test_a_stuck_job_that_was_ended_says_which_rank_was_missing() -> None:
    text = "rank 1 (pid 11) has not arrived: it is waiting for a lock at train.py:11"
    frame = Frame("wait", "/home/me/train.py", 11, "lock.acquire()", is_user=True)
    launcher = Frame("_invoke_run", "/v/site-packages/torch/distributed/elastic/agent/server/api.py", 923)
    sent = (SentSignal(1.0, 15, "stuck"),)
    words = {"sent_signals": sent, "last_frame": launcher, "stuck_text": text, "stuck_frame": frame}
    found = diagnose(Evidence(exit_code=1, duration_s=30.0, **words))[0]
    assert found.title == "ended by Jackline after 30 s: it was stuck at train.py:11"
    assert text in found.detail


def test_a_launchers_traceback_about_a_signal_is_folded() -> None:
    noise = LauncherNoise()
    lines = [
        "Traceback (most recent call last):",
        '  File "/venv/bin/torchrun", line 8, in <module>',
        "    sys.exit(main())",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 32567 got signal: 15",
        "after it",
    ]
    assert [shown for line in lines for shown in noise.feed(line)] == ["after it"]
    assert noise.num_folded == 4


def test_an_abort_while_python_ends_does_not_hide_the_error_before_it() -> None:
    at_exit = "terminate called without an active exception"
    ends = (
        RankEnd(0, 2, 4242, False, traceback(0, LOST)),
        RankEnd(1, 2, 4243, True, (*traceback(1, "ValueError: boo"), at_exit)),
    )
    tail = report((0, 1), root=(1, -6))
    found = diagnose(Evidence(exit_code=1, duration_s=9.0, output_tail=tail, ranks=ends))[0]
    assert found.title == "rank 1 of 2: ValueError: boo (train.py:17)"
    alone = diagnose(Evidence(signal=6, duration_s=9.0, output_tail=("done", at_exit)))[0]
    assert alone.title.startswith("it aborted while Python ended (SIGABRT), after its last line")
    assert "destroy_process_group" in alone.hint

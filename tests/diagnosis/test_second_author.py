"""Deaths whose programs were written by somebody who had not read the rules: cause, certainty and next action."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import DiskSpace, Evidence
from jackline.diagnosis.deaths.report import death_text
from jackline.diagnosis.frames import Frame
from jackline.machine.forecast import has_grown_steadily
from tests.diagnosis.deaths import GIB, best, evidence, run_command, run_script, said

MIB = 1 << 20
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""


def raised(error: str, **facts: object) -> Evidence:
    top = 'Traceback (most recent call last):\n  File "/w/train.py", line 41, in step\n    y = model(x)\n'
    return said(top + error, **facts)


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("no kernel image is available for execution on the device", "this PyTorch was not built for this GPU"),
        ("an illegal memory access was encountered", "a CUDA kernel touched memory it does not own"),
        ("device-side assert triggered", "a CUDA kernel found a value out of range"),
        ("uncorrectable ECC error encountered", "the GPU's memory had an error it could not correct"),
        ("misaligned address", "CUDA error: misaligned address"),
    ],
)
def test_a_cuda_error_is_told_by_its_own_line_and_not_by_the_advice_below_it(words: str, title: str) -> None:
    assert best(raised(f"RuntimeError: CUDA error: {words}{ADVICE}")).title.startswith(title)


def test_an_old_driver_is_named() -> None:
    found = best(raised("RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."))
    assert (found.cause, found.title) == (
        "cuda_error",
        "the NVIDIA driver is too old for this PyTorch at train.py:41",
    )


def test_an_allocation_that_failed_inside_cublas_is_only_likely_for_lack_of_memory() -> None:
    found = best(raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert (found.cause, found.confidence) == ("cuda_oom", "likely")


def test_memory_that_jumped_is_not_blamed_on_the_line_seen_before() -> None:
    found = evidence(signal=9, oom_kills_in_cgroup=1, peak_memory_bytes=8 * GIB, is_jump=True)
    assert "its memory had not grown before: it asked for much at once" in best(found).detail
    assert "one step needed much more than the others" in best(found).hint
    risen = evidence(signal=9, oom_kills_in_cgroup=1, is_jump=True, growing_frame=Frame("attend", "/w/model.py", 7))
    assert "rose in its last seconds at model.py:7: make what that step needs smaller" in best(risen).hint
    assert "asked for much" not in "".join(best(raised("MemoryError", is_jump=True)).detail)
    leak = [(float(at), (1000 + 30 * at) * MIB) for at in range(20)]
    spike = [(float(at), 1000 * MIB) for at in range(19)] + [(19.0, 7000 * MIB)]
    late_leak = [(at, used) for at, used in spike[:-1]] + [(19.0 + at, (1000 + 60 * at) * MIB) for at in range(8)]
    assert has_grown_steadily(leak)
    assert has_grown_steadily(late_leak)
    assert not has_grown_steadily(spike)
    assert not has_grown_steadily(spike[:-1])


def test_offline_mode_is_not_the_network(tmp_path: Path) -> None:
    found = best(
        raised(
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and "
            "outgoing traffic has been disabled. To enable look-ups online, set 'local_files_only' to False."
        )
    )
    assert "downloads are switched off (offline mode)" in found.title
    assert found.hint.startswith("unset HF_HUB_OFFLINE")
    assert not found.is_retryable


@pytest.mark.parametrize(
    ("error", "words", "is_retryable"),
    [
        ("urllib.error.HTTPError: HTTP Error 429: Too Many Requests", "asked to wait", True),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "refused access", False),
        ("urllib.error.HTTPError: HTTP Error 403: Forbidden", "refused access", False),
        ("wandb.errors.errors.UsageError: No API key configured. Use `wandb login`.", "refused access", False),
        ("botocore.exceptions.NoCredentialsError: Unable to locate credentials", "refused access", False),
        ("urllib.error.URLError: <urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] failed>", "certificate", False),
        ("requests.exceptions.ProxyError: Cannot connect to proxy.", "proxy", False),
    ],
)
def test_a_far_end_that_said_no_is_told_from_one_that_was_not_reached(
    error: str, words: str, is_retryable: bool
) -> None:
    found = best(raised(error))
    assert found.is_retryable == is_retryable
    assert words in found.title


def test_a_missing_main_guard_is_named(tmp_path: Path) -> None:
    for start in (
        "mp.set_start_method('spawn')\np = mp.Process(target=work)",
        "p = mp.get_context('spawn').Process(target=work)",
    ):
        ends = "p.start()\np.join()\nsys.exit(p.exitcode)"
        code = f"import multiprocessing as mp, sys\ndef work(): pass\n{start}\n{ends}\n"
        found = best(run_script(tmp_path, code))
        assert "`if __name__ == '__main__':` is missing" in found.title
        assert found.place is not None
        assert found.place.file.endswith("train.py")


def test_a_loss_that_is_no_number_is_the_reason_to_leave(tmp_path: Path) -> None:
    found = best(run_script(tmp_path, "import sys\nprint('Loss is nan, stopping training')\nsys.exit(1)"))
    assert found.confidence == "likely"
    assert found.title.startswith("it ended itself because its loss is no number any more: Loss is nan")
    told = said("step 3 loss nan\nstep 4 loss nan\nusage problem", exit_code=3)
    assert "no number" not in best(told).title


def test_a_file_size_limit_is_read_from_the_shells_exit_code(tmp_path: Path) -> None:
    found = best(
        run_command(["bash", "-c", f"ulimit -f 10; dd if=/dev/zero of={tmp_path}/a bs=1M count=1"], cwd=tmp_path)
    )
    assert "a file grew over its limit (ulimit -f)" in found.title


def test_a_full_disk_is_not_measured_where_the_code_lies() -> None:
    roomy = DiskSpace("/w/train.py", 60 * GIB, 200 * GIB)
    found = best(raised("OSError: [Errno 28] No space left on device", disks=(roomy,)))
    assert "no disk that Jackline knows of is full now: the unfinished file may have been removed" in found.detail
    assert "df -i" in found.hint


def test_an_error_that_is_only_in_a_log_file_is_not_looked_for_in_the_output() -> None:
    log = ("Traceback (most recent call last):", '  File "/w/train.py", line 5, in <module>', "KeyError: 'wd'")
    found = evidence(exit_code=1, log_tail=log, log_path="/w/train.log", is_log_its_own=True)
    assert best(found).hint == "the whole traceback is in /w/train.log"


def test_a_damaged_checkpoint_says_what_to_do() -> None:
    text = death_text(
        diagnose(
            found := raised("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central")
        ),
        found,
    )
    assert (
        "hint: that file is not whole, as after a kill or a full disk during its save: use an older checkpoint"
        in text
    )


# -- the second round of programs by the same author ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "host_memory_error",
        ),
        ("java.lang.OutOfMemoryError: Java heap space", "host_memory_error"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda_oom"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda_oom"),
        (
            "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:\n\n"
            "OOM when allocating tensor with shape[64,512] and type float on /device:GPU:0 by allocator GPU_0_bfc",
            "cuda_oom",
        ),
    ],
)
def test_whose_memory_ran_out_is_told_by_the_message(error: str, cause: str) -> None:
    assert best(raised(error)).cause == cause


@pytest.mark.parametrize(
    ("facts", "line", "cause"),
    [
        ({"exit_code": 137}, "slurmstepd: error: Detected 1 oom_kill event in StepId=9.batch.", "kernel_oom"),
        (
            {"exit_code": None, "signal": 15},
            "slurmstepd: error: *** JOB 9 ON gpu1 CANCELLED AT 2026-11-18T03:00:11 DUE TO TIME LIMIT ***",
            "preempted",
        ),
        ({"exit_code": 271}, "=>> PBS: job killed: walltime 3612 exceeded limit 3600", "preempted"),
    ],
)
def test_a_scheduler_that_says_why_it_ended_the_job_is_believed(facts: dict[str, int], line: str, cause: str) -> None:
    found = best(said(f"step 12 loss 2.3\n{line}", **facts))
    assert (found.cause, found.confidence) == (cause, "likely")
    assert found.detail[0].startswith("it said: ")


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Error in library(xgboost) : there is no package called 'xgboost'\nExecution halted", "Error in library"),
        (
            "ERROR: LoadError: UndefVarError: `Flux` not defined\nStacktrace:\n [1] top-level scope",
            "ERROR: LoadError",
        ),
        ("gcc -O3 a.c\na.c:12:10: fatal error: omp.h: No such file\nmake: *** [Makefile:8: a] Error 1", "a.c:12:10"),
    ],
)
def test_the_line_that_says_error_counts_more_than_the_last_one(output: str, line: str) -> None:
    found = best(said(output))
    assert (found.cause, found.confidence) == ("exit_code", "likely")
    assert found.title.startswith(f"ended with exit code 1 after this line: {line}")


def test_a_stack_that_the_script_printed_itself_gives_the_place_of_a_crash() -> None:
    tail = ("Fatal Python error: Segmentation fault", "", "Current thread 0x01 (most recent call first):")
    frames = ('  File "/w/decode.py", line 22 in read_frames', '  File "/w/train.py", line 80 in <module>')
    found = best(evidence(signal=11, output_tail=(*tail, *frames)))
    assert found.title == "it crashed in native code with a segmentation fault at decode.py:22"


def test_a_loader_worker_with_a_bus_error_points_at_shared_memory() -> None:
    found = best(
        raised(
            "RuntimeError: DataLoader worker (pid 2991) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
        )
    )
    assert (found.cause, found.confidence) == ("bus_error", "likely")
    assert "/dev/shm was full" in found.title
    assert "--shm-size" in found.hint


def test_joblib_names_the_signal_of_its_worker() -> None:
    found = best(
        raised(
            "joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process managed by the executor "
            "was unexpectedly terminated.\n\nThe exit codes of the workers are {SIGKILL(-9)}"
        )
    )
    assert "worker of the process pool was killed with SIGKILL" in found.title


def test_a_package_built_for_another_numpy_is_an_import_error_whatever_its_type() -> None:
    found = best(raised("ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96"))
    assert (found.cause, found.hint) == ("import_error", "install versions that belong together: pip check")


def test_a_quota_is_not_looked_for_with_df() -> None:
    assert "quota -s" in best(raised("OSError: [Errno 122] Disk quota exceeded: '/home/u/history.json'")).hint


def test_a_worker_that_wrote_how_it_crashed_is_not_a_riddle() -> None:
    lost = raised("ConnectionResetError: [Errno 104] Connection reset by peer").output_tail
    inner = '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv'
    tail = (*lost[:-1], inner, "    chunk = read(handle, remaining)", lost[-1])
    fault = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
    fault += '  File "/w/data.py", line 7 in __getitem__'
    found = best(evidence(exit_code=1, output_tail=tail, fault_text=fault))
    assert found.title == "a worker process crashed in native code with a segmentation fault at data.py:7"
    assert best(evidence(exit_code=1, output_tail=tail)).cause == "worker_killed"


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        ("RuntimeError: can't start new thread", "own_exception", "ulimit -u"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "own_exception", "ulimit -u"),
        ("BlockingIOError: [Errno 11] Unable to open file (unable to lock file)", "own_exception", "lsof FILE"),
        (
            "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation",
            "network",
            "try",
        ),
        (
            "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the PutObject",
            "own_exception",
            "log in",
        ),
        (
            "botocore.exceptions.ClientError: An error occurred (404) when calling the HeadObject",
            "own_exception",
            "bucket",
        ),
        (
            "google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.googleapis.com/x",
            "network",
            "try again",
        ),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: not yet initialized",
            "cuda_error",
            "fabric",
        ),
        ("IndexError: index out of range in self", "own_exception", "vocab_size"),
        (
            "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup",
            "own_exception",
            "top level",
        ),
        ("ValueError: Input X contains NaN.", "own_exception", "numpy.isnan"),
    ],
)
def test_an_error_has_the_next_action_of_its_kind(error: str, cause: str, words: str) -> None:
    found = best(raised(error))
    assert (found.cause, words in found.hint) == (cause, True), found


def test_a_crash_after_the_last_thread_is_told_by_what_the_library_printed() -> None:
    line = "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable"
    found = best(said(line, signal=11))
    assert (found.title, found.confidence) == ("no more threads or processes could be started", "likely")
    assert best(said("step 4", signal=11)).cause == "segfault"
    assert best(said(line)).confidence == "likely"  # it may have lived on without that thread
    assert best(raised("RuntimeError: can't start new thread")).confidence == "certain"


def test_a_broken_heap_is_named_in_the_words_of_the_c_library() -> None:
    assert best(said("step 4\ndouble free or corruption (!prev)", signal=6)).title.endswith(
        "aborted in native code (SIGABRT): double free or corruption (!prev)"
    )


def test_sqlite_is_not_taken_at_its_word_where_the_disk_has_room() -> None:
    error = "sqlite3.OperationalError: database or disk is full"
    roomy = best(raised(error, disks=(DiskSpace("/w/m.db-journal", 60 * GIB, 250 * GIB),)))
    assert (roomy.cause, roomy.confidence) == ("disk_full", "not sure")
    assert "PRAGMA max_page_count" in roomy.hint
    full = best(raised(error, disks=(DiskSpace("/w/m.db-journal", 0, GIB),)))
    assert (full.cause, full.confidence, full.title) == ("disk_full", "certain", "the disk is full at train.py:41")


def test_a_limit_of_the_kernel_with_the_number_of_a_full_disk_is_none() -> None:
    found = best(raised("OSError: [Errno 28] inotify watch limit reached"))
    assert (found.cause, found.confidence) == ("own_exception", "certain")
    assert "fs.inotify.max_user_watches" in found.hint


@pytest.mark.parametrize(
    ("text", "thrown"),
    [
        (
            "terminate called after throwing an instance of 'std::out_of_range'\n  what():  vector::at (7 >= 3)",
            "std::out_of_range: vector::at (7 >= 3)",
        ),
        ("terminate called after throwing an instance of 'int'", "int"),
        (
            "libc++abi: terminating due to uncaught exception of type std::runtime_error: no model",
            "std::runtime_error: no model",
        ),
    ],
)
def test_a_c_plus_plus_exception_is_named(text: str, thrown: str) -> None:
    found = best(said(f"loading\n{text}", exit_code=None, signal=6))
    assert (found.cause, found.confidence) == ("abort", "certain")
    assert found.title.endswith(f": nothing caught the C++ exception {thrown}")


def test_the_error_that_names_the_signal_of_a_worker_is_the_one_that_is_told() -> None:
    """Recorded from torch 2.13: the pipe breaks first, the signal handler says why."""
    text = """
        Traceback (most recent call last):
          File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
            chunk = read(handle, remaining)
        ConnectionResetError: [Errno 104] Connection reset by peer

        During handling of the above exception, another exception occurred:

        Traceback (most recent call last):
          File "/w/train.py", line 9, in <module>
            for b in loader: pass
        RuntimeError: DataLoader worker (pid 15702) is killed by signal: Killed.
        """
    assert "DataLoader worker 15702" in best(said(text)).title


def test_what_a_failed_command_printed_is_quoted() -> None:
    text = """
        tar (child): imagenet.tar.gz: Cannot open: No such file or directory
        Traceback (most recent call last):
          File "/w/train.py", line 2, in <module>
            subprocess.run(['tar', 'xzf', 'imagenet.tar.gz'], check=True)
        subprocess.CalledProcessError: Command '['tar', 'xzf', 'imagenet.tar.gz']' returned non-zero exit status 2.
        """
    words = "the line above the traceback: tar (child): imagenet.tar.gz: Cannot open: No such file or directory"
    assert words in best(said(text)).detail
    assert best(said(text)).confidence == "certain"


def test_a_body_that_was_cut_off_is_the_networks() -> None:
    found = best(raised("aiohttp.client_exceptions.ClientPayloadError: Response payload is not completed"))
    assert (found.cause, found.confidence, found.is_retryable) == ("network", "likely", True)


def test_the_line_of_the_script_is_told_where_python_made_the_inner_one() -> None:
    text = """
        Traceback (most recent call last):
          File "/w/train.py", line 2, in <module>
            args = TrainingArguments('out', load_best_model_at_end=True)
          File "<string>", line 117, in __init__
          File "/v/lib/python3.11/site-packages/transformers/training_args.py", line 9, in __post_init__
            raise ValueError("x")
        ValueError: x
        """
    assert best(said(text)).title == "ValueError: x (train.py:2)"

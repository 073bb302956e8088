"""Deaths that the program explained itself: what it printed is matched."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence
from jackline.diagnosis.deaths.report import death_text
from tests.diagnosis.deaths import GIB, best, run_command, run_script, said

RAN = "it ran for 41 s; peak memory 3.0 GiB of 8.0 GiB RAM"


def text_of(found: Evidence) -> str:
    return death_text(diagnose(found), found)


def raised(line: str, **facts: object) -> Evidence:
    return said(
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 41, in step\n    loss.backward()\n'
        + line,
        **facts,
    )


# -- GPU memory ------------------------------------------------------------------------------------------------------

NEW_WORDING = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 605.88 MiB is free. Including non-PyTorch memory, this process has 23.05 GiB memory in use. Of the "
    "allocated memory 21.10 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)
OLD_WORDING = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity; 13.50 GiB "
    "already allocated; 11.75 MiB free; 13.80 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
    "memory try setting max_split_size_mb to avoid fragmentation."
)


def test_the_new_wording_of_cuda_oom_gives_needed_free_and_total() -> None:
    found = raised(NEW_WORDING)
    assert text_of(found) == (
        "error: ran out of GPU memory at train.py:41: needed 2.0 GiB, 606 MiB free of 23.6 GiB\n"
        "       /home/me/train.py:41 in step: loss.backward()\n"
        "       PyTorch held 21.1 GiB and kept 1.2 GiB more without using it\n"
        f"       {RAN}\n"
        "hint: make the batch (or the sequence) smaller and accumulate gradients over more of them"
    )
    assert (best(found).cause, best(found).is_retryable) == ("cuda_oom", False)


def test_the_old_wording_of_cuda_oom_gives_the_same_and_sees_split_memory() -> None:
    found = raised(OLD_WORDING)
    assert best(found).title == "ran out of GPU memory at train.py:41: needed 20.0 MiB, 11.8 MiB free of 14.8 GiB"
    assert best(found).detail[1] == "PyTorch held 13.5 GiB and kept 307 MiB more without using it"
    assert best(found).hint == "memory is there but split up: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_another_process_on_the_gpu_is_named_with_the_command_that_ends_it() -> None:
    found = raised(NEW_WORDING.replace("Including", "Process 4242 has 12.00 GiB memory in use. Including"))
    assert "another process, pid 4242, held 12.0 GiB of the same GPU" in best(found).detail
    assert best(found).hint == "if pid 4242 is a leftover of yours, `kill 4242` frees its GPU memory"


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.",
    ],
)
def test_other_words_for_a_full_gpu_are_known(line: str) -> None:
    assert best(raised(line)).cause == "cuda_oom"


def test_cuda_oom_under_another_error_is_the_root() -> None:
    found = said(
        f"""
Traceback (most recent call last):
  File "/home/me/train.py", line 41, in step
    loss.backward()
{NEW_WORDING}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 60, in <module>
    logger.close()
AttributeError: 'NoneType' object has no attribute 'close'
"""
    )
    assert best(found).cause == "cuda_oom"


def test_an_oom_that_was_caught_long_before_is_not_the_reason() -> None:
    found = said(
        """
trying batch 64: CUDA out of memory. Tried to allocate 2.00 GiB.
Traceback (most recent call last):
  File "/home/me/train.py", line 60, in <module>
    open_config()
KeyError: 'lr'
"""
    )
    assert best(found).cause == "own_exception"


# -- host memory and disk --------------------------------------------------------------------------------------------


def test_a_memory_error_of_numpy_names_what_was_asked_for(tmp_path: Path) -> None:
    found = run_script(tmp_path, "import numpy\nnumpy.zeros((10**7, 10**7))")
    assert best(found).cause == "host_memory_error"
    assert best(found).title == "ran out of memory at train.py:2: asked for 728 TiB at once"


def test_a_bare_memory_error_is_known(tmp_path: Path) -> None:
    found = run_script(tmp_path, "raise MemoryError")
    assert (best(found).cause, best(found).title) == ("host_memory_error", "ran out of memory at train.py:1")


def test_the_cpu_allocator_of_torch_is_known() -> None:
    found = raised(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 1600000000 bytes. Error code 12 (Cannot allocate memory)"
    )
    assert best(found).cause == "host_memory_error"
    assert best(found).title == "ran out of memory at train.py:41: asked for 1.5 GiB at once"
    assert not best(found).is_retryable


def test_a_full_disk_names_the_file_and_the_room_left(tmp_path: Path) -> None:
    code = "raise OSError(28, 'No space left on device', '/mnt/out/last.pt')"
    found = run_script(tmp_path, code, disk_free_bytes=4096, disk_path="/mnt/out")
    assert text_of(found) == (
        "error: the disk is full at train.py:1: it could not write /mnt/out/last.pt\n"
        f"       {tmp_path}/train.py:1: {code}\n"
        "       OSError: [Errno 28] No space left on device: '/mnt/out/last.pt'\n"
        "       the disk of /mnt/out has 4.0 KiB free now\n"
        "hint: free space (df -h /mnt/out/last.pt shows where), then run the same command again"
    )


def test_dev_full_is_a_full_disk(tmp_path: Path) -> None:
    assert best(run_script(tmp_path, "open('/dev/full', 'w').write('x' * 10**6)")).cause == "disk_full"


def test_full_shared_memory_is_told_apart_from_a_full_disk() -> None:
    found = raised(
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_99_1_0>: No space left on device (28)"
    )
    assert best(found).title == "shared memory (/dev/shm) is full at train.py:41"
    assert best(found).hint == "use fewer DataLoader workers, or a larger /dev/shm (docker run --shm-size=8g)"


@pytest.mark.parametrize(("free", "cause"), [(0, "disk_full"), (100 * GIB, "own_exception")])
def test_a_failed_torch_save_is_a_full_disk_only_where_the_disk_is_full(free: int, cause: str) -> None:
    line = "RuntimeError: [enforce fail at inline_container.cc:783] . PytorchStreamWriter failed writing file data/7"
    assert best(raised(line, disk_free_bytes=free, disk_path="/mnt/out")).cause == cause


# -- imports, syntax, input ------------------------------------------------------------------------------------------


def test_a_missing_package_comes_with_the_command_that_installs_it(tmp_path: Path) -> None:
    assert best(raised("ModuleNotFoundError: No module named 'wandb'")).hint == "pip install wandb"


def test_a_missing_module_that_no_known_package_has_may_be_a_file_of_ones_own(tmp_path: Path) -> None:
    """`pip install helper` would install whatever somebody has published under that name."""
    found = run_script(tmp_path, "import helper_nine")
    assert text_of(found) == (
        "error: Python found no module 'helper_nine' at train.py:1\n"
        f"       {tmp_path}/train.py:1: import helper_nine\n"
        "       ModuleNotFoundError: No module named 'helper_nine'\n"
        f"       {RAN}\n"
        "hint: is 'helper_nine' a file of your own? Then start the command from the folder that has it, or add that "
        "folder to PYTHONPATH. If it is a package, its documentation names what to install: it need not be called "
        "'helper_nine'"
    )


@pytest.mark.parametrize(
    ("module", "package"), [("cv2", "opencv-python"), ("sklearn", "scikit-learn"), ("PIL", "pillow")]
)
def test_packages_with_another_name_are_known(module: str, package: str) -> None:
    assert best(raised(f"ModuleNotFoundError: No module named '{module}'")).hint == f"pip install {package}"


def test_a_missing_part_of_an_installed_package_is_a_matter_of_versions(tmp_path: Path) -> None:
    found = run_script(tmp_path, "import json.nothing_here")
    assert best(found).title == "there is no module 'json.nothing_here' at train.py:1"
    assert best(found).hint == "json may have another version than the code wants: pip show json"


def test_a_circular_import_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import y\nx = 1\n")
    (tmp_path / "b.py").write_text("from a import x\ny = 1\n")
    found = run_script(tmp_path, "import a")
    assert best(found).title == ("a circular import: 'a' is imported while it is still being imported at b.py:1")
    assert best(found).hint == "move one of the two imports into the function that needs it"


def test_a_missing_shared_library_is_told_as_such() -> None:
    found = raised("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory")
    assert best(found).cause == "import_error"
    assert best(found).title == "the library libcudart.so.12 is missing at train.py:41"


def test_an_absent_name_is_a_matter_of_versions(tmp_path: Path) -> None:
    found = run_script(tmp_path, "from json import nothing")
    assert best(found).title == "'json' has no 'nothing' at train.py:1"
    assert best(found).hint == "its version is another than the code wants: pip show json"


def test_python_dash_m_without_a_module_is_an_import_error(tmp_path: Path) -> None:
    found = run_command([sys.executable, "-m", "nothing_here"], cwd=tmp_path)
    assert (best(found).cause, best(found).title) == ("import_error", "Python found no module 'nothing_here'")


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    found = run_script(tmp_path, "x = 1\nif x = 2:\n    pass")
    assert best(found).cause == "syntax_error"
    assert best(found).title.endswith(" at train.py:2")
    assert best(found).hint == f"fix {tmp_path}/train.py:2"


def test_a_syntax_error_in_an_imported_file_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n    pass\n")
    found = run_script(tmp_path, "import broken")
    assert (best(found).cause, Path(best(found).place.file).name) == ("syntax_error", "broken.py")  # type: ignore[union-attr]


def test_a_script_that_asks_for_input_is_pointed_to_tty(tmp_path: Path) -> None:
    found = run_script(tmp_path, "name = input('name? ')")
    assert best(found).cause == "keyboard_input"
    assert best(found).title == "it asked for keyboard input and had none at train.py:1"
    assert "jackline run --tty" in best(found).hint


# -- workers ---------------------------------------------------------------------------------------------------------

LOADER = """
    Traceback (most recent call last):
      File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1291, in _try_get_data
        data = self._data_queue.get(timeout=timeout)
      File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/signal_handling.py", line 73, in handler
        _error_if_any_worker_fails()
    RuntimeError: DataLoader worker (pid 18258) is killed by signal: {signal}

    The above exception was the direct cause of the following exception:

    Traceback (most recent call last):
      File "/home/me/train.py", line 8, in <module>
        for batch in DataLoader(data, num_workers=1):
      File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1304, in _try_get_data
        raise RuntimeError(
    RuntimeError: DataLoader worker (pid(s) 18258) exited unexpectedly
"""


def test_a_killed_data_loader_worker_is_named_and_retried() -> None:
    found = said(LOADER.format(signal="Killed. "))
    assert text_of(found) == (
        "error: DataLoader worker 18258 was killed with SIGKILL, and the run ended with it (likely)\n"
        "       /home/me/train.py:8: for batch in DataLoader(data, num_workers=1):\n"
        "       the kernel counted no out-of-memory kill of this run\n"
        f"       {RAN}\n"
        "hint: `jackline logs` shows what the worker said last; with num_workers=0 its own error is seen"
    )
    assert (best(found).cause, best(found).is_retryable) == ("worker_killed", True)


def test_a_killed_worker_with_a_counted_kill_is_the_kernels_and_not_retried() -> None:
    found = said(LOADER.format(signal="Killed. "), oom_kills_in_cgroup=1, peak_memory_bytes=8 * GIB)
    assert (
        best(found).title == "the kernel killed DataLoader worker 18258 because memory ran out: the limit is 8.0 GiB"
    )
    assert (best(found).cause, best(found).confidence, best(found).is_retryable) == ("kernel_oom", "certain", False)


def test_a_killed_worker_with_full_memory_and_unreadable_counters_is_not_retried() -> None:
    facts = {"oom_kills_in_cgroup": None, "oom_kills_on_machine": None, "peak_memory_bytes": 8 * GIB}
    found = said(LOADER.format(signal="Killed. "), **facts)
    assert [(finding.cause, finding.confidence) for finding in diagnose(found)] == [
        ("worker_killed", "not sure"),
        ("kernel_oom", "not sure"),
    ]
    assert not best(found).is_retryable


@pytest.mark.parametrize(
    ("words", "cause"),
    [("Segmentation fault. ", "segfault"), ("Bus error. It is possible that", "bus_error"), ("Aborted. ", "abort")],
)
def test_a_worker_that_crashed_is_told_as_a_crash(words: str, cause: str) -> None:
    found = best(said(LOADER.format(signal=words)))
    assert found.cause == cause
    assert found.title.startswith("DataLoader worker 18258 ")


def test_a_killed_pool_worker_is_noticed(tmp_path: Path) -> None:
    code = """
        import os, signal
        from concurrent.futures import ProcessPoolExecutor

        def work(number):
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            with ProcessPoolExecutor(1) as pool:
                pool.submit(work, 1).result()
    """
    found = run_script(tmp_path, code)
    assert best(found).cause == "worker_killed"
    assert best(found).title == "a worker of the process pool ended without a word, and the run ended with it"


TORCHRUN = """
    E1115 02:39:23.5 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1
    Traceback (most recent call last):
      File "/venv/bin/torchrun", line 8, in <module>
        sys.exit(main())
      File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
        raise ChildFailedError(
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
    =======================================================
    train.py FAILED
    -------------------------------------------------------
    Failures:
    [1]:
      time      : 2026-11-15_02:39:23
      host      : localhost
      rank      : 0 (local_rank: 0)
      exitcode  : -15 (pid: 18228)  (SIGTERM)
      error_file: <N/A>
      traceback : Signal 15 (SIGTERM) received by PID 18228
    -------------------------------------------------------
    Root Cause (first observed failure):
    [0]:
      time      : 2026-11-15_02:39:23
      host      : localhost
      rank      : 1 (local_rank: 1)
      exitcode  : -9 (pid: 18229)  (SIGKILL)
      error_file: <N/A>
      traceback : Signal 9 (SIGKILL) received by PID 18229
    =======================================================
"""  # noqa: W291 - as torchrun prints it


def test_torchrun_is_read_down_to_the_rank_that_died_first() -> None:
    assert best(said(TORCHRUN)).title == "rank 1: killed with SIGKILL (kill -9) by someone else"
    assert best(said(TORCHRUN, oom_kills_in_cgroup=1)).cause == "kernel_oom"


def test_a_launcher_that_reports_a_signal_is_read() -> None:
    found = raised("subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.")
    assert best(found).title == "the launched process was killed with SIGKILL, and the run ended with it"


def test_an_unrelated_error_beside_a_counted_kill_keeps_its_place_and_says_the_other() -> None:
    found = raised("KeyError: 'lr'", oom_kills_in_cgroup=1)
    assert [(finding.cause, finding.confidence) for finding in diagnose(found)] == [
        ("own_exception", "certain"),
        ("kernel_oom", "not sure"),
    ]


# -- GPU faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "title", "is_retryable"),
    [
        ("device-side assert triggered", "a CUDA kernel found a value out of range (device-side assert)", False),
        (
            "an illegal memory access was encountered",
            "a CUDA kernel touched memory it does not own (illegal memory access)",
            False,
        ),
        (
            "no kernel image is available for execution on the device",
            "this PyTorch was not built for this GPU (no kernel image)",
            False,
        ),
        ("unspecified launch failure", "a CUDA kernel failed without a reason (launch failure)", True),
        ("uncorrectable ECC error encountered", "the GPU's memory had an error it could not correct (ECC)", True),
        ("misaligned address", "CUDA error: misaligned address", False),
    ],
)
def test_cuda_errors_are_told_apart(words: str, title: str, is_retryable: bool) -> None:
    found = best(raised(f"RuntimeError: CUDA error: {words}\nCUDA kernel errors might be asynchronously reported"))
    assert (found.cause, found.title, found.is_retryable) == ("cuda_error", f"{title} at train.py:41", is_retryable)


def test_a_device_side_assert_quotes_the_check_that_failed() -> None:
    check = "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1422: Assertion `srcIndex < srcSelectDimSize` failed."
    found = said(
        check
        + '\nTraceback (most recent call last):\n  File "/home/me/train.py", line 41, in step\n    f()\n'
        + "RuntimeError: CUDA error: device-side assert triggered"
    )
    assert "the kernel's own check: srcIndex < srcSelectDimSize" in best(found).detail


def test_a_cpu_build_is_told_as_such() -> None:
    found = best(raised("AssertionError: Torch not compiled with CUDA enabled"))
    assert (found.cause, found.title) == ("cuda_error", "this PyTorch is the CPU build at train.py:41")


def test_ranks_that_lose_contact_are_retried() -> None:
    found = best(raised("torch.distributed.DistBackendError: NCCL error in: ... ncclRemoteError: A call failed"))
    assert (found.cause, found.is_retryable) == ("nccl_timeout", True)


@pytest.mark.parametrize(
    ("text", "title", "confidence"),
    [
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with "
            "NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage"
            " of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device e1000",
            "ranks 0 and 1 use the same GPU at train.py:41",
            "certain",
        ),
        (
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, internal error - please report this "
            "issue to the NCCL developers, NCCL version 2.19.3\nncclInternalError: Internal check failed.",
            "NCCL failed: internal error at train.py:41",
            "likely",
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1273, unhandled cuda error, "
            "NCCL version 2.18.5",
            "NCCL failed: unhandled cuda error at train.py:41",
            "likely",
        ),
    ],
)
def test_a_call_that_nccl_refuses_has_lost_no_rank(text: str, title: str, confidence: str) -> None:
    found = best(raised(f"torch.distributed.DistBackendError: {text}"))
    assert (found.cause, found.title, found.confidence, found.is_retryable) == (
        "cuda_error", title, confidence, False,
    )  # fmt: skip


def test_a_network_that_nccl_lost_is_still_a_lost_rank() -> None:
    text = (
        "NCCL error in: /x/NCCLUtils.cpp:81, unhandled system error (run with NCCL_DEBUG=INFO), NCCL version 2.27.5"
    )
    found = best(raised(f"torch.distributed.DistBackendError: {text}"))
    assert (found.cause, found.is_retryable) == ("nccl_timeout", True)


# -- network ---------------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_the_network_and_retried(tmp_path: Path) -> None:
    found = run_script(tmp_path, "import urllib.request as r\nr.urlopen('http://127.0.0.1:9/x')")
    assert (best(found).cause, best(found).is_retryable) == ("network", True)
    assert best(found).title == "the network or a server failed at train.py:2"


@pytest.mark.parametrize(
    "line",
    [
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://hub.example/x",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='hub.example', port=443): Read timed out.",
        "http.client.IncompleteRead: IncompleteRead(7 bytes read, 9 more expected)",
        "OSError: We couldn't connect to 'https://hub.example' to load this file",
    ],
)
def test_words_of_a_failing_network_are_known(line: str) -> None:
    assert best(raised(line)).cause == "network"


def test_a_network_error_without_a_traceback_is_quoted_as_it_stands() -> None:
    line = "cannot list http://hub.example/x: Connection refused"
    found = best(said(f"error: the data cannot be loaded\n       {line}\nhint: other data", exit_code=1))
    assert (found.cause, found.title) == ("network", "the network or a server failed (hub.example)")
    assert found.detail[0] == line


@pytest.mark.parametrize(
    "line",
    [
        "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://hub.example/x",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub.example/x",
    ],
)
def test_a_refusal_of_the_request_itself_is_not_retried(line: str) -> None:
    assert (best(raised(line)).cause, best(raised(line)).is_retryable) == ("own_exception", False)


def test_a_port_that_is_taken_is_not_retried() -> None:
    found = best(raised("OSError: [Errno 98] Address already in use"))
    assert (found.cause, found.is_retryable) == ("network", False)


# -- own errors and exit codes ---------------------------------------------------------------------------------------


def test_an_own_exception_names_line_source_and_memory(tmp_path: Path) -> None:
    code = """
        def read(settings):
            return settings["lr"]

        read({})
    """
    found = run_script(tmp_path, code)
    assert text_of(found) == (
        "error: KeyError: 'lr' (train.py:2)\n"
        f'       {tmp_path}/train.py:2 in read: return settings["lr"]\n'
        f"       {RAN}\n"
        "hint: `jackline logs` shows the whole traceback; run the same command again once it is fixed"
    )
    assert not best(found).is_retryable


def test_a_chain_of_own_exceptions_names_the_root_and_then_the_last(tmp_path: Path) -> None:
    code = """
        try:
            [][3]
        except IndexError as error:
            raise RuntimeError("no sample") from error
    """
    found = run_script(tmp_path, code)
    assert best(found).title == "IndexError: list index out of range (train.py:2)"
    assert best(found).detail[1] == "then: RuntimeError: no sample at train.py:4"


def test_too_many_open_files_comes_with_the_limit_to_raise() -> None:
    hint = best(raised("OSError: [Errno 24] Too many open files: 'x'")).hint
    assert hint == "close files once they are read (`with open(...)`), or raise the limit: ulimit -n 65536"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x20 and 10x2)", "print x.shape above it"),
        (
            "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at dimension 1",
            "print x.shape",
        ),
        ("ValueError: operands could not be broadcast together with shapes (3,) (4,)", "print x.shape"),
        ("FloatingPointError: loss is inf at step 0", "the training diverged"),
        ("ValueError: non-finite gradient in layer 3", "the training diverged"),
        ("RuntimeError: Loss diverged: nan loss at step 12", "the training diverged"),
        ("ValueError: loss_fn must be one of mse, info_nce", "`jackline logs` shows the whole traceback"),
    ],
)
def test_what_trainings_fail_of_comes_with_the_next_action(error: str, says: str) -> None:
    assert says in best(raised(error)).hint


def test_a_thread_that_failed_beside_a_program_that_ended_well_is_no_pipe(tmp_path: Path) -> None:
    code = "import threading\nthread = threading.Thread(target=lambda: int('x'))\nthread.start()\nthread.join()"
    finding = best(run_script(tmp_path, code))
    assert finding.cause == "finished" and finding.confidence == "not sure"
    assert finding.hint.startswith("a thread ended with that error")


def test_an_exit_code_without_a_word_quotes_the_last_line(tmp_path: Path) -> None:
    found = run_script(tmp_path, "print('bye')\nraise SystemExit(3)")
    assert text_of(found) == (
        "error: ended with exit code 3; its output names no known error\n"
        "       its last line: bye\n"
        f"       {RAN}\n"
        "hint: read the end of its output: `jackline logs`"
    )


def test_wrong_arguments_are_told_as_such(tmp_path: Path) -> None:
    code = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr")
        parser.parse_args()
    """
    found = run_script(tmp_path, code, "--lrr", "3")
    assert (best(found).cause, best(found).title) == (
        "exit_code",
        "train.py did not accept its arguments: unrecognized arguments: --lrr 3",
    )


def test_a_command_that_does_not_exist_is_told_by_the_shell(tmp_path: Path) -> None:
    found = run_command(["bash", "-c", "torchrunn train.py"], cwd=tmp_path)
    assert (best(found).cause, best(found).title) == (
        "command_not_found",
        "'torchrunn' was not found (exit code 127)",
    )


def test_a_file_that_cannot_be_executed_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("echo hello\n")
    found = run_command(["bash", "-c", "./train.sh"], cwd=tmp_path)
    assert (best(found).cause, best(found).title) == (
        "command_not_found",
        "the command cannot be executed (exit code 126)",
    )


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    found = run_command([sys.executable, "trian.py"], cwd=tmp_path)
    assert best(found).cause == "command_not_found"
    assert best(found).title == f"Python found no file {tmp_path}/trian.py"


@pytest.mark.parametrize(("between", "confidence"), [("", "certain"), ("\\n", "likely")])
def test_what_was_said_after_a_traceback_is_quoted(tmp_path: Path, between: str, confidence: str) -> None:
    """Directly below it may belong to the message; after an empty line the program has surely gone on."""
    code = f"""
        import sys, traceback
        try:
            {{}}["lr"]
        except KeyError:
            traceback.print_exc()
        sys.exit("{between}the settings file is incomplete")
    """
    found = run_script(tmp_path, code)
    assert (best(found).cause, best(found).confidence) == ("own_exception", confidence)
    assert "its last line: the settings file is incomplete" in best(found).detail


def test_an_error_before_a_launchers_report_stays_certain(tmp_path: Path) -> None:
    inner = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 5, in <module>\n    f()\nKeyError: 1\n'
    )
    found = said(inner + "W1115 closing\n" + textwrap.dedent(TORCHRUN).replace("exitcode  : -9 (pid: 18229)", ""))
    assert (best(found).title, best(found).confidence) == ("KeyError: 1 (train.py:5)", "certain")


def test_an_error_in_our_own_form_is_told_with_its_detail_and_hint() -> None:
    found = said(
        """
        [train] data
        error: the data of recipe 'demo' cannot be loaded: nowhere/*.txt
               there is no file nowhere/*.txt
        hint: --data SOURCE trains on other data
        """
    )
    assert text_of(found) == (
        "error: the data of recipe 'demo' cannot be loaded: nowhere/*.txt\n"
        "       there is no file nowhere/*.txt\n"
        f"       {RAN}\n"
        "hint: --data SOURCE trains on other data"
    )
    assert (best(found).cause, best(found).is_retryable) == ("exit_code", False)

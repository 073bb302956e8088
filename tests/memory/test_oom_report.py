"""What is told after out of memory, and the settings that make it rarer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jackline.machine.readings import GpuProcess, GpuReading
from jackline.memory.guard.allocator_settings import allocator_environment, allocator_fraction, cap_allocator
from jackline.memory.guard.oom import OomNumbers, is_out_of_memory, read_numbers
from jackline.memory.guard.oom_report import (
    CleanUp,
    GpuUser,
    OomFacts,
    about_fitting,
    clean_up,
    oom_text,
    other_users,
)

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.90 GiB of which 613.50"
            " MiB is free.",
            OomNumbers(2 * GIB, int(613.5 * MIB), int(15.9 * GIB)),
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.75 GiB total capacity; 13.22 GiB already"
            " allocated; 6.81 MiB free; 13.70 GiB reserved in total by PyTorch)",
            OomNumbers(20 * MIB, int(6.81 * MIB), int(14.75 * GIB)),
        ),
        (
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
            " allocate 1024 bytes.",
            OomNumbers(1024),
        ),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", OomNumbers()),
    ],
)
def test_the_numbers_are_read_from_every_torchs_words(text: str, expected: OomNumbers) -> None:
    assert read_numbers(text) == expected
    assert is_out_of_memory(RuntimeError(text))


LIMITED = (
    "CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 138.50 GiB is"
    " free. Process 41 has 1.20 GiB memory in use. 512.00 MiB allowed; Of the allocated memory 490.00 MiB is"
    " allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
)


def test_under_a_limit_of_its_own_what_the_process_may_still_take_is_said() -> None:
    numbers = read_numbers(LIMITED)

    assert (numbers.free_bytes, numbers.allowed_bytes) == (12 * MIB, 512 * MIB)
    assert oom_text(OomFacts(step=2, micro_batch=4, numbers=numbers)).splitlines()[0] == (
        "error: out of GPU memory at step 2: needed 26.0 MiB, 12.0 MiB free of the 512 MiB that this process may use"
    )


def test_other_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("out of memory"))


NUMBERS = OomNumbers(2 * GIB, int(0.6 * GIB), int(23.6 * GIB))


def test_the_largest_part_and_what_would_have_fitted_are_named() -> None:
    parts = {"weights": GIB, "activations": int(14.2 * GIB), "logits": 3 * GIB}
    facts = OomFacts(41, 16, NUMBERS, shape="16 x 1024", parts=parts, fitting_micro_batch=13)
    assert oom_text(facts) == (
        "error: out of GPU memory at step 41: needed 2.0 GiB, 614 MiB free of 23.6 GiB\n"
        "       largest part: activations, 14.2 GiB at micro-batch 16 (16 x 1024)\n"
        "hint: micro-batch 13 would have fitted; run.safe_step keeps the batch the same"
    )


def test_others_on_the_gpu_are_named_with_their_pids() -> None:
    others = (GpuUser(4211, "python old_run.py", 9 * GIB), GpuUser(77, "", None))
    assert oom_text(OomFacts(3, 8, NUMBERS, others=others)) == (
        "error: out of GPU memory at step 3: needed 2.0 GiB, 614 MiB free of 23.6 GiB\n"
        "       micro-batch 8\n"
        "       also on this GPU: pid 4211 (python old_run.py), 9.0 GiB\n"
        "       also on this GPU: pid 77 (not visible from here, perhaps in another container or already dead),"
        " an unknown amount\n"
        "hint: ending the other processes frees 9.0 GiB"
    )


def test_an_error_without_numbers_still_says_where() -> None:
    assert oom_text(OomFacts(3, 8, OomNumbers())) == (
        "error: out of GPU memory at step 3\n"
        "       micro-batch 8\n"
        "hint: `jackline plan ... --explain` shows what would save memory"
    )


def test_ghosts_and_strangers_are_told_apart_from_us(tmp_path: Path) -> None:
    (tmp_path / "proc" / "500").mkdir(parents=True)
    (tmp_path / "proc" / "500" / "cmdline").write_bytes(b"python\0other.py\0--lr\0001\0")
    processes = tuple(
        GpuProcess(pid, size) for pid, size in ((os.getpid(), 5), (400, 6), (500, 7), (600, None), (9, 8))
    )
    gpu = GpuReading(0, "T4", 15 * GIB, 0, None, None, None, processes)
    assert other_users([gpu], [9], root=tmp_path) == (
        GpuUser(500, "python other.py --lr", 7),
        GpuUser(400, "", 6),
        GpuUser(600, "", None),
    )


def test_split_memory_needs_a_new_process() -> None:
    assert CleanUp(8 * GIB, int(6.7 * GIB), int(0.5 * GIB)).needs_restart
    assert not CleanUp(8 * GIB, int(0.6 * GIB), int(0.5 * GIB)).needs_restart


def test_without_a_gpu_there_is_nothing_to_clean_and_nothing_to_cap() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert clean_up() == CleanUp(0, 0, 0)
    assert cap_allocator() is None


OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {OLD: "expandable_segments:True", NEW: "expandable_segments:True"}),
        (
            {OLD: "garbage_collection_threshold:0.8"},
            {
                OLD: "garbage_collection_threshold:0.8,expandable_segments:True",
                NEW: "garbage_collection_threshold:0.8,expandable_segments:True",
            },
        ),
        ({NEW: "expandable_segments:False"}, {OLD: "expandable_segments:False"}),
        ({OLD: "max_split_size_mb:128"}, {NEW: "max_split_size_mb:128"}),
        ({OLD: "expandable_segments:True", NEW: "expandable_segments:True"}, {}),
    ],
)
def test_segments_are_expandable_unless_a_person_chose_otherwise(
    environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert allocator_environment(environ, is_wsl=False) == expected


def test_wsl_has_no_expandable_segments() -> None:
    assert allocator_environment({}, is_wsl=True) == {}


def test_the_cap_leaves_what_others_hold_and_a_little_more() -> None:
    assert allocator_fraction(10 * GIB, 10 * GIB) == pytest.approx(1 - 0.0125)
    assert allocator_fraction(40 * GIB, 80 * GIB) == pytest.approx(0.49)
    assert allocator_fraction(0, 80 * GIB) == 0.0
    assert allocator_fraction(1, 0) == 1.0


def test_what_would_have_fitted_is_told_from_the_error_and_what_does_not_depend_on_the_batch() -> None:
    numbers = OomNumbers(2 * GIB, GIB, 24 * GIB, allocated_bytes=20 * GIB, unused_bytes=GIB)
    # 4 GiB stay, 18 GiB are 16 samples; of the 22 GiB that could be had 18 are left for samples.
    assert about_fitting(16, numbers, 4 * GIB) == 14
    assert about_fitting(16, numbers, 22 * GIB) == 0
    assert about_fitting(1, numbers, 4 * GIB) == 0
    assert about_fitting(16, OomNumbers(), 4 * GIB) == 0


def test_in_a_container_our_own_process_is_not_taken_for_a_stranger() -> None:
    users = (GpuProcess(901, 3 * GIB), GpuProcess(902, 9 * GIB))
    gpu = GpuReading(0, "T4", 15 * GIB, 12 * GIB, None, None, None, users)
    assert [user.pid for user in other_users([gpu], (), own_bytes=int(8.6 * GIB))] == [901]
    assert [user.pid for user in other_users([gpu], ())] == [902, 901]

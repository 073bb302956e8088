"""Copies by several threads at once: every byte, once, and progress that never promises too much."""

import ctypes
import mmap
import threading

import pytest
import torch

from jackline.checkpoint.staging import moves as module
from jackline.checkpoint.staging.moves import Move, Moving
from tests.deadline import HANGS_S


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART_BYTES", 4096)


def prepare(count: int) -> tuple[torch.Tensor, torch.Tensor, list[Move]]:
    """`count` tensors of uneven lengths one after another, and a place for each."""
    size = 10_000
    source = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(count * size, dtype=torch.uint8)
    lengths = [size - 7 * (number % 5) for number in range(count)]
    moves = [
        (target.data_ptr() + number * size, source.data_ptr() + number * size, length)
        for number, length in enumerate(lengths)
    ]
    for number, length in enumerate(lengths):
        source[number * size + length : (number + 1) * size] = 0
    return source, target, moves


@pytest.mark.parametrize("helpers", [0, 1, 6])
def test_with_any_number_of_helpers_every_byte_arrives(helpers: int) -> None:
    source, target, moves = prepare(200)
    moving = Moving(moves)
    threads = [threading.Thread(target=moving.help) for _ in range(helpers)]
    for thread in threads:
        thread.start()
    moving.run()
    assert torch.equal(source, target)
    for thread in threads:
        thread.join()


def test_what_is_told_to_be_there_is_there() -> None:
    source, target, moves = prepare(300)
    moving = Moving(moves)
    told: list[int] = []

    def check(address: int) -> None:
        count = address - target.data_ptr()
        assert torch.equal(target[:count], source[:count])
        told.append(address)

    other = threading.Thread(target=moving.help)
    other.start()
    moving.run(check)
    other.join()
    assert told == sorted(told) and told[0] == moves[0][0]


def test_the_loop_can_do_it_all_itself_when_nobody_else_comes() -> None:
    source, target, moves = prepare(20)
    moving = Moving(moves)
    assert not moving.over.is_set()
    moving.help()
    assert moving.over.is_set() and torch.equal(source, target)
    moving.run()  # the engine's thread comes late and finds nothing to do


def test_over_waits_for_the_last_part_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, moves = prepare(4)
    may_go, has_begun = threading.Event(), threading.Event()

    def slow_at_first(part: Move) -> None:
        if part[0] == target.data_ptr():
            has_begun.set()
            assert may_go.wait(HANGS_S)
        ctypes.memmove(*part)

    monkeypatch.setattr(module, "_move", slow_at_first)
    moving = Moving(moves)
    slow = threading.Thread(target=moving.help)
    slow.start()
    assert has_begun.wait(HANGS_S)
    moving.help()
    assert not moving.over.is_set()
    may_go.set()
    slow.join()
    assert moving.over.is_set() and torch.equal(source, target)


def test_nothing_to_move_is_over_at_once() -> None:
    assert Moving().over.is_set() and Moving().is_empty


def test_memory_that_is_gone_breaks_the_copy_and_not_the_process() -> None:
    source, target, moves = prepare(3)
    reserve = ctypes.CDLL(None).mmap
    reserve.restype, reserve.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 4)
    address = reserve(None, 8192, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # nobody may read it
    moving = Moving([*moves, (target.data_ptr(), address, 8192)])
    moving.run()
    assert moving.is_broken and moving.over.is_set() and torch.equal(source[8192:], target[8192:])


def test_while_another_thread_is_alive_a_copy_at_once_is_of_one_instant() -> None:
    """The other thread fills one block after another with the next number, each in one call that keeps the GIL."""
    count, size = 64, 1 << 18
    source = torch.zeros(count * size, dtype=torch.uint8)
    target = torch.zeros(count * size, dtype=torch.uint8)
    moves = [(target.data_ptr() + n * size, source.data_ptr() + n * size, size) for n in range(count)]
    fill = ctypes.PyDLL(None).memset
    fill.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    is_over, has_begun = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            fill(source.data_ptr() + number % count * size, number // count % 256, size)
            number += 1
            has_begun.set()

    other = threading.Thread(target=write)
    other.start()
    assert has_begun.wait(HANGS_S)
    try:
        for _ in range(20):
            assert module.has_other_threads()
            module.copy_at_once(moves)
            blocks = target.view(count, size)
            assert bool((blocks == blocks[:, :1]).all()), "a block changed while it was copied"
            firsts = blocks[:, 0].tolist()
            at = next((n for n in range(1, count) if firsts[n] != firsts[0]), count)
            rest = set(firsts[at:])
            assert rest <= {(firsts[0] - 1) % 256}, "a block was copied that was written after one before it"
    finally:
        is_over.set()
        other.join()


def test_our_own_threads_and_this_one_are_no_other_threads() -> None:
    may_go = threading.Event()
    ours = threading.Thread(target=may_go.wait, name="jackline-something")
    before = module.has_other_threads()
    ours.start()
    assert module.has_other_threads() == before
    may_go.set()
    ours.join()


def test_copies_beside_a_step_use_what_torch_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(16)))
    for torch_threads, wanted in ((16, 1), (15, 1), (14, 2), (8, 4), (1, 4)):
        monkeypatch.setattr(module.torch, "get_num_threads", lambda torch_threads=torch_threads: torch_threads)
        assert module.spare_cores() == wanted

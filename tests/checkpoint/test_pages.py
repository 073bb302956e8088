"""Huge pages under tensors that are copied beside a step."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from jackline.checkpoint.staging import pages
from jackline.checkpoint.staging.pages import HugePages, gather, is_allowed, whole_pages

MIB = 1 << 20


def test_only_whole_huge_pages_are_asked_for() -> None:
    assert whole_pages(0, 2 * MIB) == (0, 2 * MIB)
    assert whole_pages(1, 4 * MIB) == (2 * MIB, 2 * MIB)
    assert whole_pages(1, 2 * MIB)[1] == 0


def test_values_and_addresses_stay() -> None:
    tensor = torch.arange(3 * MIB)
    address, expected = tensor.data_ptr(), tensor.clone()
    assert gather([(address, tensor.nbytes)]) in (0, whole_pages(address, tensor.nbytes)[1])
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, expected)


def test_memory_that_was_freed_does_not_end_the_process() -> None:
    import ctypes

    area = mmap.mmap(-1, 8 * MIB)
    view = ctypes.c_char.from_buffer(area)
    address = ctypes.addressof(view)
    del view
    area.close()
    assert gather([(address, 8 * MIB)]) >= 0  # anything may lie there by now


def test_each_stretch_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(pages, "gather", seen.append)
    monkeypatch.setattr(pages, "is_allowed", lambda: True)
    wanted = HugePages()
    for stretches in ([(0, 4 * MIB), (0, 100)], [(0, 4 * MIB)], [(8 * MIB, 4 * MIB)]):
        if thread := wanted.want(stretches):
            thread.join()
    assert seen == [[(0, 4 * MIB)], [(8 * MIB, 4 * MIB)]]


def test_a_machine_that_forbids_them_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    assert not is_allowed(setting)
    setting.write_text("always madvise [never]\n")
    assert not is_allowed(setting)
    setting.write_text("always [madvise] never\n")
    assert is_allowed(setting)
    monkeypatch.setattr(pages, "is_allowed", lambda: False)
    assert HugePages().want([(0, 4 * MIB)]) is None

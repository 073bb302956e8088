"""Kernels that end with the test, and everything they started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook.kernel import Kernel
from tests.shell import Shell


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Shell]:
    """Runs, registry and a work folder of their own; whatever was started from there ends with the test."""
    found = Shell(tmp_path / "person")
    found.env.update(JACKLINE_DATA=str(tmp_path / "data"), OMP_NUM_THREADS="1", PIP_NO_INDEX="1")
    yield found
    found.close()


@pytest.fixture
def open_kernel(person: Shell, tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    kernels: list[Kernel] = []

    def begin() -> Kernel:
        folder = tmp_path / f"kernel-{len(kernels)}"
        folder.mkdir()
        kernels.append(Kernel(folder, person.work, person.env))
        return kernels[-1]

    yield begin
    for kernel in kernels:
        kernel.close()

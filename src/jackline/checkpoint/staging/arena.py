"""Memory that the trainer fills and the writer reads: allocated once, shared by descriptor, pinned for the GPU.

It holds the checkpoint's tensor files byte for byte as they will be on the disk, so the writer needs no copy of its
own.
Owns the memory. Does not own what is put where (layout.py) or when (stage.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading

import torch

from jackline import accelerator

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Arena:
    """`size_bytes` of shared memory. `ready` is set when its pages exist and, with a GPU, are pinned."""

    def __init__(self, size_bytes: int, *, is_pinned: bool) -> None:
        self.size_bytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = _shared_memory(self.size_bytes)
        self._map = mmap.mmap(self.fd, self.size_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.is_pinned = False
        self.ready = threading.Event()
        # The first touch of a page costs more than all later copies together (2.6 s per GiB were measured in a
        # virtual machine, against 0.09 s for a copy). So a thread touches the pages during the first steps and not in
        # the first save.
        threading.Thread(target=self._make_ready, args=(is_pinned,), daemon=True, name="jackline-arena").start()

    def write(self, data: bytes, offset: int) -> None:
        self._map[offset : offset + len(data)] = data

    def read(self, offset: int, length: int) -> bytes:
        return self._map[offset : offset + length]

    def close(self) -> None:
        """Free the memory once nothing refers to it any more."""
        self.ready.wait()
        if self.is_pinned:
            accelerator.unpin_memory(self.address)
        os.close(self.fd)
        del self.tensor
        with contextlib.suppress(BufferError):
            self._map.close()

    def _make_ready(self, is_pinned: bool) -> None:
        try:
            if is_pinned:
                self.is_pinned = accelerator.pin_memory(self.address, self.size_bytes)
            if not self.is_pinned:
                madvise = ctypes.CDLL(None).madvise
                madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes), _POPULATE_WRITE)
        except (OSError, AttributeError, RuntimeError):
            pass  # the arena still works, only slower
        finally:
            self.ready.set()


def _shared_memory(size_bytes: int) -> int:
    """Memory with a file descriptor. It has no name, so no process leaves anything behind when it is killed."""
    try:
        fd = os.memfd_create("jackline-checkpoint", os.MFD_CLOEXEC)
    except (OSError, AttributeError):  # some sandboxes have no memfd
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size_bytes)
    return fd

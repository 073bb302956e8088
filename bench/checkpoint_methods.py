"""Ways to save a training state, all behind the same four calls, so that one loop can measure them all.

Each is used as its own documentation recommends. `begin` is what the loop calls, `before_change` what it calls
before the optimizer steps, `is_durable` says whether the bytes have reached the disk (fsync included), `end` waits.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.staging.gather import GpuCopies
from jackline.checkpoint.writer.retention import Keep
from jackline.rundir.layout import RunDir

BLOCK_BYTES = 8 << 20


def flat_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and optimizer tensors under plain names, for the peers."""
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    for number, values in state["optim"].state_dict()["state"].items():
        tensors |= {f"optim.{number}.{word}": value for word, value in values.items() if isinstance(value, Tensor)}
    return tensors


class Method:
    """The common part: where it writes, and nothing pending."""

    name = ""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.folder = folder
        self.state = state
        self.number = 0
        folder.mkdir(parents=True)

    def place(self) -> Path:
        self.number += 1
        return self.folder / f"save-{self.number}"

    def before_change(self) -> None:
        pass

    def is_durable(self) -> bool:
        return True

    def is_quiet(self) -> bool:
        """Whether nothing it started is continuing any more."""
        return self.is_durable()

    def end(self) -> None:
        """Waits until durable, then frees the disk."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self) -> None:
        raise NotImplementedError


class Nothing(Method):
    """No save at all, for about as long as one takes: how far two windows of steps differ by themselves."""

    name = "no save (noise)"
    began_s = 0.0

    def begin(self) -> None:
        self.began_s = time.perf_counter()

    def is_durable(self) -> bool:
        return time.perf_counter() - self.began_s > 1.0


class TorchSave(Method):
    name = "torch.save + fsync"

    def begin(self) -> None:
        with open(self.place(), "wb") as file:
            torch.save(flat_state(self.state), file)
            file.flush()
            os.fsync(file.fileno())


class Safetensors(Method):
    name = "safetensors + fsync"

    def begin(self) -> None:
        from safetensors.torch import save_file

        path = self.place()
        save_file(flat_state(self.state), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())


class DcpAsync(Method):
    """As the call is without options: every save makes its staging memory anew."""

    name = "dcp.async_save"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        self._options: dict[str, Any] = {}
        self._saving: Any = None
        self._staged: Any = None

    def begin(self) -> None:
        from torch.distributed.checkpoint import async_save

        found = async_save(flat_state(self.state), checkpoint_id=str(self.place()), **self._options)
        self._staged = getattr(found, "staging_completion", None)
        self._saving = getattr(found, "upload_completion", found)

    def before_change(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def is_durable(self) -> bool:
        return self._saving is None or self._saving.done()

    def end(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        super().end()


class DcpKept(DcpAsync):
    """With a stager that the caller makes once and hands in each time, so that staging memory is there already."""

    name = "dcp.async_save, stager kept"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(folder, state)
        self._options = {"async_stager": DefaultStager(StagingOptions(False, False, False, False))}

    def close(self) -> None:
        self._options["async_stager"].close()
        super().close()


class DiskAlone(Method):
    """As many bytes of zeros to the disk and back by another program, nothing copied, nothing hashed: what the
    machine itself takes from a training for so much reading and writing."""

    name = "the disk alone (dd)"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        size = sum(tensor.numel() * tensor.element_size() for tensor in flat_state(state).values())
        self._num_blocks = size // BLOCK_BYTES
        self._copying: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        block = f"bs={BLOCK_BYTES} count={self._num_blocks} status=none"
        path = shlex.quote(str(self.place()))
        write = f"dd if=/dev/zero of={path} {block} oflag=direct conv=fsync"
        read = f"dd if={path} of=/dev/null {block} iflag=direct"
        self._copying = subprocess.Popen(["nice", "-n", "10", "sh", "-c", f"{write} && {read}"])

    def is_durable(self) -> bool:
        return self._copying is None or self._copying.poll() is not None

    def end(self) -> None:
        if self._copying is not None:
            assert self._copying.wait() == 0
            self._copying = None
        super().end()


class HandMade(Method):
    """What an expert writes in an afternoon: one preallocated (pinned) buffer, copies beside the next step, a thread
    with O_DIRECT. No checksums, no commit protocol, no fall-back, no verification."""

    name = "hand-made, O_DIRECT thread"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        tensors = flat_state(state)
        self._is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        self._places: list[tuple[str, int, int]] = []
        position = 0
        for name, tensor in tensors.items():
            position = -(-position // 64) * 64
            self._places.append((name, position, tensor.numel() * tensor.element_size()))
            position += self._places[-1][2]
        size = -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
        raw = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=self._is_cuda)
        raw.zero_()
        skip = -raw.data_ptr() % mmap.PAGESIZE
        self._buffer = raw[skip : skip + size]
        self._side = torch.cuda.Stream() if self._is_cuda else None
        self._event: Any = None
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        tensors = flat_state(self.state)
        self._copied.clear()
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                for name, start, size in self._places:
                    tensor = tensors[name]
                    view = self._buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
                    view.copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record(self._side)
        self._thread = threading.Thread(target=self._work, args=(self.place(), tensors))
        self._thread.start()

    def before_change(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        elif self._thread is not None:
            self._copied.wait()

    def is_durable(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread, self._event = None, None
        super().end()

    def _work(self, path: Path, tensors: dict[str, Tensor]) -> None:
        if self._event is not None:
            self._event.synchronize()
        else:
            for name, start, size in self._places:
                ctypes.memmove(self._buffer.data_ptr() + start, tensors[name].data_ptr(), size)
            self._copied.set()
        write_direct(path, self._buffer.data_ptr(), self._buffer.numel())
        path.with_suffix(".json").write_text(json.dumps(self._places))


class Ours(Method):
    """Jackline, everything included: checksums, commit, acknowledgement, reading back."""

    name = "jackline, overlapped"
    overlap = True
    gpu = GpuCopies()

    def __init__(self, folder: Path, state: dict[str, Any], share: Ours | None = None) -> None:
        super().__init__(folder, state)
        run = RunDir(folder / "run")
        run.path.mkdir()
        settings = EngineSettings(keep=Keep(last=1), gpu=self.gpu)
        self.engine = share.engine if share else CheckpointEngine(run, settings)
        self.engine.prepare(state)
        assert self.engine._area.arena is not None
        self.engine._area.arena.ready.wait()
        self.ticket: Any = None
        self.has_read_back = True

    def begin(self) -> None:
        self.has_read_back = False
        step = 1 + max((name.step for name in list_names(self.engine.folder)), default=0)
        self.ticket = self.engine.save(self.state, step=step, overlap=self.overlap)
        assert self.ticket.outcome != "skipped", self.ticket

    def before_change(self) -> None:
        self.engine.before_change()

    def is_durable(self) -> bool:
        self._listen()
        return self.ticket is None or self.ticket.is_over

    def is_quiet(self) -> bool:
        """The reading back is part of the price."""
        return self.is_durable() and self.has_read_back

    def _listen(self) -> None:
        for event in self.engine.poll():
            if event.kind == "verified" and self.ticket is not None and event.step == self.ticket.step:
                self.has_read_back = True

    def end(self) -> None:
        self.engine.before_change()
        if self.ticket is not None:
            assert self.ticket.wait(600), self.ticket
            while not self.has_read_back:
                self._listen()
                time.sleep(0.001)

    def close(self) -> None:
        if self.engine.why_off != "the engine is closed":
            self.engine.close(linger_s=60)
        super().close()


class OursBounce(Ours):
    """On a GPU: batches of small tensors through a buffer there."""

    name = "jackline, through a buffer"
    gpu = GpuCopies("bounce")


class OursEach(Ours):
    """On a GPU: every tensor by itself."""

    name = "jackline, each tensor"
    gpu = GpuCopies("none")


class OursBlocking(Ours):
    """As an attached loop saves."""

    name = "jackline, attached loop"
    overlap = False


def write_direct(path: Path, address: int, size: int, threads: int = 4) -> None:
    """The disk's own speed: O_DIRECT by several threads into reserved space, fsync; no header, no checksum."""
    from jackline.checkpoint.format.parallel import run_in_threads

    data = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, size)

        def write(start: int) -> None:
            os.pwrite(fd, data[start : start + BLOCK_BYTES], start)

        run_in_threads(write, list(range(0, size, BLOCK_BYTES)), threads)
        os.fsync(fd)
    finally:
        os.close(fd)

"""A trainer without torch: it stages states and asks the real writer to save them, as fast as it can, until killed.

The state of a step is a known function of the step, so whoever finds a checkpoint can tell whether it is right. Torch
takes seconds to start; this takes a tenth, so a minute holds hundreds of kills.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.header import ALIGNMENT, build_header, lay_out
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.staging.writer_process import WriterProcess
from jackline.checkpoint.writer.retention import Keep
from jackline.checkpoint.writer.serve import Options
from tests.deadline import HANGS_S

FILES = ("model", "optim")


def image(step: int, file: str, size: int) -> bytes:
    """The tensor file of a step."""
    placed = lay_out([("w", "U8", (size,))])
    return build_header(placed) + random.Random(f"{step} {file} {size}").randbytes(size)


def state_json(step: int) -> bytes:
    return json.dumps({"step": step, "words": "x" * (step % 5000)}).encode()


def is_right(path: Path, step: int, size: int) -> bool:
    """Whether a checkpoint is the state of its step, byte for byte."""
    files_right = all((path / f"{file}.safetensors").read_bytes() == image(step, file, size) for file in FILES)
    return files_right and (path / "state.json").read_bytes() == state_json(step)


def newest_whole(folder: Path) -> tuple[int, Path] | None:
    for name in list_names(folder):
        try:
            verify_checkpoint(folder / str(name), is_direct=False, threads=1)
        except Damage:
            continue
        return name.step, folder / str(name)
    return None


class LightTrainer:
    """Stages and saves. `writer_command` may be a writer with a fault."""

    def __init__(
        self, folder: Path, size: int, writer_command: tuple[str, ...] = (), options: Options | None = None
    ) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, 1)
        room = 2 * (size + 3 * ALIGNMENT)
        self._fd = os.memfd_create("light", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, room)
        self._memory = mmap.mmap(self._fd, room)
        self.writer = WriterProcess(options or Options(folder, os.getpid(), Keep(last=3)), writer_command)
        self.writer.send({"op": "arena", "size_bytes": room}, fd=self._fd)
        self.reports: list[dict[str, Any]] = []

    def wait_for(self, *kinds: str, timeout_s: float = HANGS_S) -> dict[str, Any] | None:
        """The next report of one of these kinds; None when the writer is gone or silent."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            new = self.writer.reports(0.2)
            self.reports += new
            for report in new:
                if report["event"] in kinds:
                    return report
            if self.writer.is_gone:
                return None
        return None

    def stage(self, step: int) -> dict[str, Any]:
        """Fills the arena; returns the message that hands it over."""
        files, position = [], 0
        for file in FILES:
            data = image(step, file, self._size)
            self._memory[position : position + len(data)] = data
            files.append({"name": f"{file}.safetensors", "size_bytes": len(data), "arena_offset": position})
            position += -(-len(data) // ALIGNMENT) * ALIGNMENT
        return {"op": "save", "id": step, "step": step, "created_at_s": time.time(), "files": files}

    def save(self, step: int) -> dict[str, Any] | None:
        self.writer.send(self.stage(step), state_json(step))
        return self.wait_for("committed", "failed")


def main() -> None:
    """FOLDER ACKS SIZE: saves one step after another and notes each acknowledged one, until killed."""
    folder, acks, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    note = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trainer = LightTrainer(folder, size)
    if trainer.wait_for("ready", "refused", timeout_s=HANGS_S) is None:
        sys.exit("the writer did not get ready")
    found = newest_whole(folder)
    step = found[0] if found else 0
    if found is not None and not is_right(found[1], step, size):
        os.write(note, b"WRONG %d\n" % step)
        sys.exit(1)
    os.write(note, b"RESUME %d\n" % step)
    while True:
        step += 1
        report = trainer.save(step)
        if report is None:
            sys.exit("the writer is gone")
        if report["event"] == "committed":
            os.write(note, b"ACK %d\n" % step)


if __name__ == "__main__":
    main()

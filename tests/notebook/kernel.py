"""A person in a notebook: runs cells, looks at what they show, presses stop, restarts the kernel.

A real kernel in a process of its own, as a notebook server starts it. Waiting is for a state, with a deadline.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.deadline import HANGS_S

PATIENCE_S = HANGS_S


@dataclass
class Cell:
    """What stands under one cell."""

    id: str
    printed: str = ""
    blocks: list[str] = field(default_factory=list)  # every state of the block that is replaced
    pages: list[str] = field(default_factory=list)  # the same as HTML, where there is any
    num_displays: int = 0
    error: list[str] = field(default_factory=list)
    is_idle: bool = False

    @property
    def text(self) -> str:
        return "\n".join([self.printed, *self.blocks[-1:], *self.error])


class Kernel:
    """One kernel and the front end of it."""

    def __init__(self, folder: Path, cwd: Path, env: dict[str, str]) -> None:
        self._how = {"cwd": str(cwd), "env": {**env, "IPYTHONDIR": str(folder / "ipython")}}
        self._manager = KernelManager(connection_file=str(folder / "kernel.json"))
        self._manager.start_kernel(**self._how)
        self._client = self._connect()
        self._cell: Cell | None = None

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        cell = self.start(code)
        return self.wait(cell, lambda: cell.is_idle, "the cell to end")

    def start(self, code: str) -> Cell:
        self._cell = Cell(self._client.execute(code))
        return self._cell

    def wait(self, cell: Cell, state: Callable[[], bool], what: str) -> Cell:
        deadline_s = time.monotonic() + PATIENCE_S
        while not state():
            assert time.monotonic() < deadline_s, f"waited in vain for {what}; the cell shows:\n{cell.text}"
            self._read(cell)
        return cell

    def interrupt(self) -> None:
        """The stop button."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        self._client.stop_channels()
        self._manager.restart_kernel(now=True)
        self._client = self._connect()

    def close(self) -> None:
        if self._manager.has_kernel is False:
            return
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def _connect(self) -> BlockingKernelClient:
        client: BlockingKernelClient = self._manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE_S)
        return client

    def _read(self, cell: Cell) -> None:
        try:
            message: dict[str, Any] = self._client.get_iopub_msg(timeout=0.1)
        except queue.Empty:
            return
        if message["parent_header"].get("msg_id") != cell.id:
            return
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            cell.printed += content["text"]
        elif kind in ("display_data", "update_display_data"):
            assert set(content["data"]) in ({"text/plain"}, {"text/plain", "text/html"})  # no widgets
            cell.blocks.append(content["data"]["text/plain"])
            cell.pages += [content["data"]["text/html"]] if "text/html" in content["data"] else []
            cell.num_displays += kind == "display_data"
        elif kind == "error":
            cell.error = content["traceback"]
        elif kind == "status":
            cell.is_idle = content["execution_state"] == "idle"

"""How the trainer's process ends when everything is written: at once.

Taking torch and its compiler apart object by object took 1.5 to 2.3 s on two cores, and torch waits up to five
minutes for the compiler's side process, also for one that is still importing: a short run on an H200 lived for 8 s
after its last line, and was seen in that wait. The kernel does it all in a moment. Owns only that; what must be
closed was closed before.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """The end of the process, as Python's own up to the point where it takes the interpreter apart.

    Threads that are no daemons are waited for, functions registered for the exit are called (a recipe of a person's
    own may have some), streams are flushed.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    drop_unready_workers()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def drop_unready_workers() -> None:
    """Ends the compiler's side process if it is still importing: it has no work, and torch would wait for it."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is None:
        return
    with contextlib.suppress(Exception):  # these names are torch's own: where they are others, it waits as before
        ready = compiler.AsyncCompile._ready_future
        if ready is not None and ready.done():
            return  # at work or idle, and then it ends within a moment of being asked
        for pool in list(compiler._pool_set):
            with pool.write_lock:
                pool.running = False  # or its reader complains about the end we are making
            pool.process.kill()
            pool.process.wait(timeout=5.0)

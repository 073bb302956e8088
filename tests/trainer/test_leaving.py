"""The end of the trainer's process: nothing that was promised is lost, and nothing is waited for in vain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.deadline import HANGS_S

ENDING = """
import atexit, sys, threading, time
from jackline.trainer.startup.process import leave

class Slow:
    def __del__(self):
        print("taken apart")

kept = Slow()
open_file = open(sys.argv[1], "w")
atexit.register(print, "called at the exit")
is_last = threading.Event()
def work():
    is_last.wait()
    open_file.write("of a thread")
    open_file.close()
threading.Thread(target=work).start()
sys.stdout.write("not flushed, ")
is_last.set()
leave(75)
"""

NEVER_READY = """
import os, sys
import torch._inductor.async_compile as compiler
import torch._inductor.compile_worker.subproc_pool as subproc_pool
from jackline.trainer.startup.process import leave

subproc_pool.find_compile_subproc_binary = lambda: sys.argv[1]
compiler.get_compile_threads = lambda: 2
assert not compiler.AsyncCompile.use_process_pool()
[pool] = compiler._pool_set
print(pool.process.pid, flush=True)
leave(0)
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)


def test_what_is_registered_and_begun_is_finished_but_the_interpreter_is_not_taken_apart(tmp_path: Path) -> None:
    done = run(ENDING, str(tmp_path / "file"))
    assert (done.returncode, done.stdout, done.stderr) == (75, "not flushed, called at the exit\n", "")
    assert (tmp_path / "file").read_text() == "of a thread"


def test_a_compilers_process_that_never_starts_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\nexec sleep 1000\n")
    worker.chmod(0o755)
    done = run(NEVER_READY, str(worker))
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.path.exists(f"/proc/{int(done.stdout)}")

"""How the trainer's process begins and ends: torch loaded in as little time as Python allows, and a quick exit.

Owns where the bytecode of 2,400 modules is kept when nobody else keeps it, and that the garbage collector does not
walk through them again and again while they load. Opening a GPU and importing torch's compiler each take seconds;
one after another they were a quarter of a restart. So a thread opens the GPU (it waits in C) while the caller
imports: two threads that import halves of torch can meet in the middle. At the end, taking torch and its compiler
apart object by object took 1.5 to 2.3 s on two cores, and torch waits up to five minutes for the compiler's side
process: a short run on an H200 lived for 8 s after its last line. The kernel does it all in a moment; what must be
closed was closed before. Imports nothing but the standard library until it is used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jackline import accelerator

if TYPE_CHECKING:
    import torch


def keep_bytecode(package: str = "torch") -> Path | None:
    """Makes Python keep compiled sources in a folder of ours, where it would compile them at every start.

    That is so when a package came without them (uv installs so) or with those of other sources (an image that set all
    times anew), and Python must not write beside the sources: their folder is read-only, or containers set
    PYTHONDONTWRITEBYTECODE to keep those folders clean, and they stay clean. Torch and its compiler then cost 17 s of
    CPU at every start instead of 5.5; in a restart on an H200 half of the main thread's samples were such compiling.
    Children inherit it.
    None: not needed, or not possible.
    """
    if sys.pycache_prefix is not None or _is_kept_elsewhere(package):
        return None
    folder = own_cache("bytecode")  # 70 MB that depend on nothing but the sources; Python checks their age itself
    if folder is None:
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return folder


# What torch's compiler loads, in about this order. `import torch` is under way before anybody could run ahead of it.
_LOADED_LATER = ("torch/fx", "sympy", "mpmath", "torch/_dynamo", "torch/_functorch", "torch/_inductor", "networkx",
                 "torch/distributed", "torch/ao", "torch/onnx", "torch/export", "torch/_export",
                 "triton")  # fmt: skip
_MIN_CORES = 4
_DISABLED = "__dynamo_disable"  # torch's own name: where it is another one, the compiler is imported as before
_ahead: list[subprocess.Popen[bytes]] = []


def compile_ahead() -> None:
    """Lets other cores compile the sources that this process will import, after `keep_bytecode` chose a new folder.

    One thread of Python compiles them one after another as it imports: 13 s of the 57 s before the first step on an
    H200, and as much again in each of the compiler's own processes. Nothing waits for it: what is not ready is
    compiled where it is imported, as before.
    """
    cores = len(os.sched_getaffinity(0))
    last = importlib.util.find_spec("torch")
    if cores < _MIN_CORES or last is None or last.origin is None:
        return
    if os.path.exists(importlib.util.cache_from_source(last.origin)):
        return  # an earlier run has filled the folder
    packages = Path(last.origin).parents[1]
    files = [
        str(path)
        for name in _LOADED_LATER
        for path in sorted((packages / name).rglob("*.py"))
        if not {"tests", "testing", "benchmarks"} & set(path.parts)
    ]
    command = [sys.executable, "-m", "compileall", "-q", "-j", str(min(8, cores - 2)), "-i", "-"]
    with contextlib.suppress(OSError):
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _ahead.append(made)
        assert made.stdin is not None
        threading.Thread(
            target=made.communicate, args=("\n".join(files).encode(),), daemon=True, name="jackline-ahead"
        ).start()


def own_cache(name: str) -> Path | None:
    """A folder of this person's cache for code that is executed: nobody else may put something there. None: no."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jackline"
    except RuntimeError:  # a container that runs as a number without an entry in passwd
        home = Path("/tmp") / f"jackline-cache-{os.getuid()}"
    from jackline.rundir.access.writing import private_folder

    try:
        folder = private_folder(private_folder(home) / name)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _is_kept_elsewhere(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.has_location or spec.origin is None:
        return True
    if _is_of(importlib.util.cache_from_source(spec.origin), spec.origin):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)


def _is_of(bytecode: str, source: str) -> bool:
    """Whether Python would take it: of this Python, and of the source as it is now (PEP 552)."""
    try:
        with open(bytecode, "rb") as file:
            header = file.read(16)
        status = Path(source).stat()
    except OSError:
        return False
    flags, time_s, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    is_same = (time_s, size) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return header[:4] == importlib.util.MAGIC_NUMBER and (flags != 0 or is_same)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """For imports: what they make stays, so looking for garbage in it is a fifth of their time.

    Afterwards all of it is out of the collector's sight, so that no later collection walks through 600,000 objects
    that never die (0.3 s each, in the middle of a step). The 8 MB of garbage among them are the price.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def open_gpu(device: torch.device) -> threading.Thread:
    """Begins to open it; join before the device is used. What goes wrong is found again there, and told there."""
    thread = threading.Thread(target=_open, args=(device,), daemon=True, name="jackline-open-gpu")
    if accelerator.is_gpu(device):
        thread.start()
    return thread


def wait_for(thread: threading.Thread) -> None:
    if thread.ident is not None:
        thread.join()


def import_compiler() -> None:
    """About 3 s that `model.compile()` and its first call would take otherwise."""
    with contextlib.suppress(ImportError), without_collecting():
        import torch._inductor.compile_fx  # noqa: F401


def delay_compiler() -> None:
    """Lets torch's optimizers work without its compiler: 1 s and 90 MB in every process that compiles nothing.

    To stay out of its graphs their methods import it when they are first called. Until somebody else imports it there
    are no graphs; from then on they do as torch has them. Before the first optimizer is made.
    """
    import torch

    for kind in (torch.optim.Optimizer, *torch.optim.Optimizer.__subclasses__()):
        for name, method in list(vars(kind).items()):
            inner, code = getattr(method, "__wrapped__", None), getattr(method, "__code__", None)
            if inner is None or code is None:
                continue
            if method.__globals__.get("__name__") == "torch._compile":
                inner.__dict__.setdefault(_DISABLED, _until_compiler(method, inner))
            elif code.co_name == "_use_grad" and kind.__module__.startswith("torch.optim."):
                setattr(kind, name, functools.wraps(inner)(_until_compiler(method, _as_differentiable(inner))))


def _until_compiler(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """The method of an optimizer, and what is inside of it for as long as there is no compiler."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return inner(*args, **kwargs)
        inner.__dict__.pop(_DISABLED, None)
        return method(*args, **kwargs)

    return call


def _as_differentiable(step: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, or with them for an optimizer that was asked for them: what torch does around a step."""
    import torch

    def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return call


def _open(device: torch.device) -> None:
    import torch

    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device)
        accelerator.synchronize(device)


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
    while _ahead:
        _ahead.pop().kill()
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

"""What a card and a compiler take their time for, begun while data and model are still being made ready.

Opening a card takes seconds of waiting in the driver, and so does importing torch's compiler; done one after another
they were a quarter of a restart. The card is opened by a thread (it waits in C), the import stays with the caller,
because two threads that import halves of torch can meet in the middle. Owns nothing that lasts.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from jackline.trainer.startup.importing import without_collecting


def open_card(device: torch.device) -> threading.Thread:
    """Begins to open it; join before the device is used. What goes wrong is found again there, and told there."""
    thread = threading.Thread(target=_open, args=(device,), daemon=True, name="jackline-open-card")
    if device.type == "cuda":
        thread.start()
    return thread


def wait_for(thread: threading.Thread) -> None:
    if thread.ident is not None:
        thread.join()


def import_compiler() -> None:
    """About 3 s that `model.compile()` and its first call would take otherwise."""
    with contextlib.suppress(ImportError), without_collecting():
        import torch._inductor.compile_fx  # noqa: F401


def _open(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)

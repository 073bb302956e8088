"""The end of a run with a mirror: waits until the last checkpoint is there, and reports how far the upload is.

Owns the wait and its limits. Does not own the upload (checkpoint/mirror) or what the run's end means (run.py).
"""

from __future__ import annotations

import time

from jackline.checkpoint.format.catalogue import MIRROR
from jackline.checkpoint.mirror.progress import Left, UploadWait, read_left
from jackline.rundir.records.mirror import read_mirror
from jackline.session.attachment import Attachment
from jackline.session.home import read_grace_s
from jackline.session.phase import Phase
from jackline.session.stopping import Stopped
from jackline.units import format_duration

GRACE_SHARE = 0.7  # of the grace period of a stop; the rest is for the exit itself
LOOK_EVERY_S = 0.1
ASK_EVERY_S = 2.0
TELL_AFTER_S, TELL_EVERY_S = 2.0, 10.0  # lines of output also show the supervisor that this is no hang


def wait_mirrored(attached: Attachment, error: BaseException | None) -> BaseException | None:
    """Before the end: wait for the mirror. Returns what the block is left with.

    A complete run that is not in its mirror is left with Stopped: it is not finished, and can be resumed.
    """
    saver, is_stop = attached.saver, isinstance(error, Stopped)
    if saver.engine.mirror is None or saver.why_off:
        return error
    is_restarting = attached.host is not None and attached.host.leaving is not None
    try:
        if (error is None or is_stop) and not is_restarting:
            saver.wait()
            left = upload_rest(attached, limit_s=_rest_of_grace_s(attached) if is_stop else None)
        else:
            left = read_left(saver.engine.folder)
    except (KeyboardInterrupt, Stopped) as again:  # a second Ctrl-C or SIGTERM during the wait
        return again
    if left is None:
        return error
    if error is None:
        text = f"complete at step {attached.stepper.steps_done}, but not finished: {left.text()}"
        return Stopped(f"{text}; `jackline resume {attached.name}` uploads the rest")
    text = f"{left.text()}; its upload continues in the background"
    attached.reporter.event("not_mirrored", text, is_loud=True, name=left.name)
    return error


def _rest_of_grace_s(attached: Attachment) -> float:
    grace_s = read_grace_s(attached.home.run, attached.settings.grace_s)
    return max(0.0, GRACE_SHARE * grace_s - (time.monotonic() - attached.stop.at_s))


def upload_rest(attached: Attachment, *, limit_s: float | None) -> Left | None:
    """Wait until the mirror has the newest checkpoint. Returns what it lacks; None when it has everything.

    Ends after `mirror_patience_s` without a byte uploaded, after `limit_s` in any case, and when a stop is requested
    during the wait.
    """
    saver, was_asked = attached.saver, attached.stop.is_made
    engine, began_s = saver.engine, time.monotonic()
    wait = UploadWait(number := time.time_ns() // 1_000_000, attached.settings.mirror_patience_s, began_s)
    ask_s, tell_s = 0.0, began_s + TELL_AFTER_S
    left = read_left(engine.folder)
    total = left.total_bytes if left else None
    with attached.pulse.inside(Phase("upload", None, total=total, unit="bytes")) as bar:
        while True:
            now_s = time.monotonic()
            if now_s >= ask_s:
                ask_s = now_s + ASK_EVERY_S
                engine.ask_mirror(number)
            saver.poll(now_s)
            state = wait.look(read_mirror(engine.folder / MIRROR), now_s)
            if state == "done":
                return None
            left = read_left(engine.folder)
            bar.update(left.done_bytes if left else total or 0)
            if now_s >= tell_s:
                tell_s = now_s + TELL_EVERY_S
                what = left.text() if left else "the mirror is being verified"
                text = f"waiting for the mirror, {format_duration(now_s - began_s)} so far: {what}"
                attached.reporter.event("waits_for_mirror", text, is_loud=True)
            is_over = limit_s is not None and now_s - began_s >= limit_s
            is_told = attached.stop.is_made and not was_asked
            if state == "given up" or is_over or is_told or saver.why_off:
                return left
            time.sleep(LOOK_EVERY_S)

"""What `why` says of a live process, judged by somebody who had not read the rules."""

from __future__ import annotations

import pytest

from jackline.cli.text import why_live
from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack, innermost_user_frame
from jackline.machine.readings import TreeReading
from tests.supervisor.worlds import Proc


def test_one_reading_tells_no_rate_however_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TreeReading(0.0, (Proc(7).reading(),), {})
    frame = Frame("<module>", "/me/get.py", 3, "urlretrieve(url)", is_user=True)
    inside = (
        Frame("read", "/usr/lib/python3/http/client.py", 4),
        Frame("urlretrieve", "/usr/lib/urllib/request.py", 5),
    )
    stack = ProcessStack(7, "python get.py", (ThreadStack(7, "MainThread", (*inside, frame), True),), "py-spy")
    monkeypatch.setattr(why_live, "_elapsed_s", lambda _: 9.0)
    monkeypatch.setattr(why_live, "read_gpus", tuple)
    look = why_live._gather(7, tree, tree, (stack,), None, 5.0)
    assert (look.doing.what, look.cpu_cores) == ("downloading", None)


def test_jackline_s_rescue_in_the_main_thread_is_no_place_of_the_program() -> None:
    home = "/env/lib/python3.11/site-packages/jackline"
    rescue = (
        Frame("wait", f"{home}/checkpoint/writer/wire.py", 86),
        Frame("finish", f"{home}/checkpoint/rescue/take.py", 90),
        Frame("_on_exception", f"{home}/supervisor/child/inside/leaving.py", 62),
    )
    # The script's own frames are gone when an exception nobody caught is handled, but not when it calls sys.exit.
    assert innermost_user_frame(ThreadStack(7, "MainThread", rescue, True)) is None
    left = Frame("main", "/w/train.py", 12, "sys.exit(1)", is_user=True)
    assert innermost_user_frame(ThreadStack(7, "MainThread", (*rescue, left), True)) == left

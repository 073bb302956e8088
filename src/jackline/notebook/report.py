"""`notebook.report`: the page of `jackline report` inside a cell, and as a file beside the notebook.

The page is shown in a frame of its own without scripts, so that its style stays inside. In plain Python only the file
is written.
"""

from __future__ import annotations

import html
import os
import time
from pathlib import Path

from jackline.notebook.command import say, without_traceback
from jackline.notebook.look import Which, find
from jackline.session.home import is_notebook

HEIGHT = 640


@without_traceback
def report(run: Which = None, out: str | os.PathLike[str] | None = None) -> Path:
    """Write what a run did into one HTML file and show it. Without `run`: the only live one, else the newest."""
    from jackline.review.document import to_html
    from jackline.review.report import make_report
    from jackline.review.summary import summarise

    found = find(run)
    page = to_html(make_report(summarise(found, now_s=time.time())))
    path = Path(out) if out is not None else Path(f"{found.name}-report.html")
    path.write_text(page, encoding="utf-8", errors="replace")
    if is_notebook():
        from IPython.display import display

        frame = (
            f'<iframe sandbox="" srcdoc="{html.escape(page, quote=True)}" width="100%" height="{HEIGHT}"'
            f' style="border:0" title="report of {html.escape(found.name, quote=True)}"></iframe>'
        )
        plain = f"report of run '{found.name}': {path}"
        display({"text/html": frame, "text/plain": plain}, raw=True)  # type: ignore[no-untyped-call]
    say(f"the report of run '{found.name}' is in {path}")
    return path

"""The card under a cell that watches a run: HTML with charts, and the same as plain text. Pure but for `Card.show`.

The card is replaced in place through IPython's own display: no widgets, which die with a reloaded tab, and no script.
Front ends without HTML show the text. Everything from the run is escaped.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackline.cli.pages.told import tell
from jackline.cli.text.safety import safe_output, safe_text
from jackline.cli.text.status import status_text
from jackline.cli.view.run_view import RunView
from jackline.dashboard.told import Card as Fact
from jackline.dashboard.told import Told
from jackline.review.chart import Chart, Line, svg, thin
from jackline.review.summary import FIRST
from jackline.rundir.access.reading import read_end
from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import Series, read_series

LAST_LINES = 10
LINE_CHARS = 200
MAX_CHARTS = 2
MAX_METRIC_BYTES = 256 << 10  # of a longer file, parts from its beginning to its end
COLUMNS = 150  # of a chart; a card is sent again and again
_TAIL_BYTES = 16 << 10
_STAMP = re.compile(r"^\S+Z ")
# Colours that hold on light and dark pages; the text takes the page's own.
STYLE = """
.jackline{font:14px/1.45 system-ui,sans-serif;max-width:760px;border:1px solid #8886;border-radius:8px;
padding:10px 14px}
.jackline p{margin:2px 0}.jackline .dim{opacity:.7;font-size:12px}
.jackline b.good{color:#2e9e4f}.jackline b.warn{color:#b8860b}.jackline b.bad{color:#d0443a}
.jackline progress{width:100%;height:10px}
.jackline .facts{display:flex;flex-wrap:wrap;gap:6px 18px;margin:6px 0}
.jackline .facts div{flex:1 1 150px;min-width:0;overflow-wrap:anywhere}
.jackline h5{margin:0;font-size:12px;opacity:.7;font-weight:600}
.jackline svg{width:100%;height:auto;display:block;overflow:visible}
.jackline svg text{font:11px system-ui,sans-serif;fill:currentColor;opacity:.75}
.jackline svg .y{text-anchor:end}.jackline svg .x{text-anchor:middle}.jackline svg .grid{stroke:#8884}
.jackline svg .break{stroke:#d0443a;stroke-dasharray:3 3}
.jackline svg polyline{fill:none;stroke:#3b7de0;stroke-width:1.6}.jackline svg circle{fill:#3b7de0}
.jackline pre{font-size:12px;white-space:pre-wrap;margin:6px 0 0;opacity:.85}
"""


class Card:
    """It belongs to the cell in which it was first shown."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str, page: str) -> None:
        from IPython.display import display

        bundle = {"text/plain": text, "text/html": page}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)


def card_text(view: RunView) -> str:
    lines = last_lines(Path(view.log.path))
    return _filtered("\n".join([status_text(view), *(["", *lines] if lines else []), *_as_of(view)]))


def card_html(view: RunView, charts: Sequence[str]) -> str:
    told = tell(view, short=False)
    parts = [
        f"<style>{STYLE}</style>",
        f'<div class="jackline" role="status"><p><b class="{told.tone}">{_escape(told.sentence)}</b> '
        f'<span class="dim">{_escape(told.name)}</span></p>',
        _progress(told),
        *(f"<p>{_escape(line)}</p>" for line in told.details[:2]),
        f'<div class="facts">{"".join(map(_fact, told.cards))}</div>',
        *charts,
    ]
    lines = last_lines(Path(view.log.path))
    if lines:
        parts.append(f"<pre>{_escape(chr(10).join(lines))}</pre>")
    parts.append(f'<p class="dim">{_escape(" ".join([_what_stops_it(view, told), *_as_of(view)]))}</p></div>')
    return "".join(parts)


def _as_of(view: RunView) -> list[str]:
    """What changes with each drawing: in a run of hours nothing else does, and a cell that stands looks dead."""
    return [f"As of {time.strftime('%H:%M:%S UTC', time.gmtime(view.now_s))}."] if view.is_live else []


def _progress(told: Told) -> str:
    if told.share is None:
        return ""
    words = _escape(told.progress or "progress")
    return f'<progress max="1" value="{told.share:.4f}" aria-label="{words}">{100 * told.share:.0f} %</progress>'


def _fact(fact: Fact) -> str:
    lines = "".join(f"<p>{_escape(line)}</p>" for line in fact.lines[:3])
    return f"<div><h5>{_escape(fact.title)}</h5>{lines}</div>"


def _what_stops_it(view: RunView, told: Told) -> str:
    if view.is_live:
        return f"Stopping this cell, closing the tab or restarting the kernel does not stop it; `{told.resume}` does."
    if view.status.state in ("stopped", "dead"):
        return "Running its cell again resumes it, from its newest checkpoint if it has one."
    return ""


def read_charts(run: RunDir) -> list[str]:
    """The most important curves as SVG, each with its newest value in words."""
    found = read_series(run, max_bytes=MAX_METRIC_BYTES)
    ordered = sorted(found, key=lambda series: (_rank(series.name), series.name))
    return [chart for series in ordered[:MAX_CHARTS] if (chart := _chart(series))]


def _chart(series: Series) -> str:
    points = series.points
    has_steps = all(point.step is not None for point in points)
    spots = [(point.step if has_steps else float(at), point.value) for at, point in enumerate(points)]
    thinned = tuple(thin([(x or 0.0, y) for x, y in spots], COLUMNS))
    name = safe_text(series.name, 60)
    drawn = svg(Chart(name, (Line(name, thinned),), "step" if has_steps else "report"))
    return f"<h5>{_escape(name)}: {points[-1].value:.4g}</h5>{drawn}" if drawn else ""


def _rank(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def last_lines(log: Path) -> list[str]:
    """The end of what it printed, without the times that out.log puts before each line."""
    try:
        data, is_cut = read_end(log, _TAIL_BYTES)
    except OSError:
        return []
    lines = data.decode("utf-8", "replace").splitlines()
    whole = lines[1:] if is_cut else lines
    return [safe_text(_STAMP.sub("", line), LINE_CHARS) for line in whole[-LAST_LINES:]]


def _escape(text: str) -> str:
    return html.escape(_filtered(text), quote=True)


def _filtered(text: str) -> str:
    """As `jackline` prints it: a cell has no stream of ours that would do it."""
    return safe_output(text.encode("utf-8", "replace")).decode()

"""The parts of a report, as plain data, and the two ways to write them: one HTML file, and Markdown.

The HTML runs no script and asks no network for anything; text is always escaped. Owns the look, not the contents.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Sequence

from jackline.immutable import immutable
from jackline.review.chart import Chart, svg, thin, x_text
from jackline.review.goodput import USES, Account


@immutable
class Text:
    """A paragraph; `tone` is '', 'good', 'bad' or 'warn'."""

    text: str
    tone: str = ""


@immutable
class Table:
    rows: tuple[tuple[str, ...], ...]
    header: tuple[str, ...] = ()


@immutable
class Plain:
    """Output, stacks, commands: shown as it is."""

    text: str


@immutable
class Bar:
    """The attempts and their phases over time."""

    account: Account


Block = Text | Table | Plain | Bar | Chart


@immutable
class Section:
    title: str
    blocks: tuple[Block, ...]


@immutable
class Document:
    title: str
    lead: tuple[Text, ...]
    sections: tuple[Section, ...]


STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--dim:#5a6270;--rule:#d9dde3;--good:#1a7f37;--bad:#b3261e;
--warn:#8a5a00;--box:#f5f6f8}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ee;--bg:#14171b;--dim:#a0a8b4;--rule:#333a44;--good:#57d27a;
--bad:#ff8a80;--warn:#f0b95c;--box:#1d2127}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:860px;margin:0 auto;
padding:16px;overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:.2em 0}h2{font-size:1.05rem;margin:1.6em 0 .4em;border-bottom:1px solid var(--rule)}
h3{font-size:.95rem;margin:1em 0 .2em}.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:2px 12px 2px 0;vertical-align:top;
border-bottom:1px solid var(--rule)}th{font-weight:600;color:var(--dim);white-space:nowrap}
.key span{margin-right:14px;white-space:nowrap}.key svg{display:inline;width:11px;height:11px;margin-right:5px}
pre{background:var(--box);padding:8px 10px;overflow-x:auto;font-size:12.5px;white-space:pre-wrap}
svg{width:100%;height:auto;display:block;overflow:visible}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
svg .y{text-anchor:end}svg .x{text-anchor:middle}svg .grid{stroke:var(--rule)}
svg .break{stroke:var(--bad);stroke-dasharray:3 3}svg polyline{fill:none;stroke-width:1.6;stroke:#2f6fde}
svg .l1{stroke:#c4551d}svg circle{fill:#2f6fde}summary{color:var(--dim);cursor:pointer;font-size:13px}
.u0{fill:#2e9e4f}.u1{fill:#7aa7e8}.u2{fill:#9a7be0}.u3{fill:#d98a2b}.u4{fill:#e0c04a}.u5{fill:#5bb8b0}
.u6{fill:#6f8fae}.u7{fill:#d0443a}.u8{fill:#9aa3ad}.u9{fill:#7a1f1a}.u10{fill:#b9bfc7}.u11{fill:#d9dde3}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(document: Document) -> str:
    body = [f"<h1>{_escape(document.title)}</h1>", *map(_html, document.lead)]
    for section in document.sections:
        body += [f"<section><h2>{_escape(section.title)}</h2>", *map(_html, section.blocks), "</section>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{_escape(document.title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Text):
        tone = f' class="{block.tone}"' if block.tone else ""
        return f"<p{tone}>{_escape(block.text)}</p>"
    if isinstance(block, Plain):
        return f"<pre>{_escape(block.text)}</pre>"
    if isinstance(block, Table):
        return _html_table(block)
    return _html_bar(block.account) if isinstance(block, Bar) else _html_chart(block)


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in table.header)
    rows = ["<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows]
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{''.join(rows)}</table>"


def _html_chart(chart: Chart) -> str:
    """The picture, and a table with some of its values for those who cannot see it."""
    drawn = svg(chart)
    if not drawn:
        return ""
    names = "" if len(chart.lines) < 2 else " (" + ", ".join(line.name for line in chart.lines) + ")"
    table = _html_table(Table(tuple(_values(chart)), (chart.x_name, *(line.name for line in chart.lines))))
    return f"<h3>{_escape(chart.title + names)}</h3>{drawn}<details><summary>as numbers</summary>{table}</details>"


def _values(chart: Chart) -> Sequence[tuple[str, ...]]:
    """About twelve places of the x axis, the last one among them; for each line the last value until then."""
    spots = chart.lines[0].spots
    rows = []
    for number in sorted({*range(0, len(spots), max(1, len(spots) // 12)), len(spots) - 1} if spots else set()):
        x = spots[number][0]
        cells = []
        for line in chart.lines:
            num_past = bisect_right(line.spots, x, key=lambda spot: spot[0])
            cells.append(chart.y_text(line.spots[num_past - 1][1]) if num_past else "")
        rows.append((x_text(chart, x), *cells))
    return rows


def _html_bar(found: Account) -> str:
    if not found.wall_us:
        return ""
    begin = found.spans[0].begin_us
    parts = ['<svg viewBox="0 0 600 34" role="img" aria-label="attempts and phases over time">']
    for span in found.spans:
        x = 600 * (span.begin_us - begin) / found.wall_us
        width = max(0.3, 600 * span.length_us / found.wall_us)
        number = f"attempt {span.attempt}, " if span.attempt is not None else ""
        told = f"{number}{span.use}"
        parts.append(
            f'<rect class="u{USES.index(span.use)}" x="{x:.2f}" y="2" width="{width:.2f}" height="30">'
            f"<title>{_escape(told)}</title></rect>"
        )
    seen = found.seconds()
    key = "".join(
        f'<span><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="u{number}" width="10" height="10"/></svg>'
        f"{_escape(use)}</span>"
        for number, use in enumerate(USES)
        if use in seen
    )
    return "".join([*parts, f'</svg><p class="key">{key}</p>'])


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def to_markdown(document: Document) -> str:
    lines = [f"# {_mark(document.title)}", ""]
    for text in document.lead:
        lines += [_mark(text.text), ""]
    for section in document.sections:
        lines += [f"## {_mark(section.title)}", ""]
        for block in section.blocks:
            lines += _markdown(block)
    return "\n".join(lines).rstrip() + "\n"


def _markdown(block: Block) -> list[str]:
    if isinstance(block, Text):
        return [_mark(block.text), ""]
    if isinstance(block, Plain):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        return [fence, block.text, fence, ""]
    if isinstance(block, Table):
        header = block.header or tuple("" for _ in block.rows[0]) if block.rows else block.header
        rows = [header, tuple("---" for _ in header), *block.rows]
        return [*("| " + " | ".join(_mark(cell) for cell in row) + " |" for row in rows), ""]
    if isinstance(block, Chart):
        values = tuple(_values(block)) if block.lines and thin(block.lines[0].spots) else ()
        table = Table(values, (block.x_name, *(line.name for line in block.lines)))
        return [f"### {_mark(block.title)}", "", *_markdown(table)] if values else []
    return []


def _mark(text: str) -> str:
    """A line of text that Markdown shows as it is."""
    flat = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in flat)

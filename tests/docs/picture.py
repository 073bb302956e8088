"""The README's picture: a real run in a real terminal, drawn as SVG. `scripts/picture` calls this.

Owns the scene, a terminal that keeps colours, and the drawing. Lines appear in the order in which they were printed,
with the same pauses, shortened. The text of the last screen is kept beside the picture, for the test and for people.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
COMMAND = """\
jackline run --checkpoints 'ckpt/*' --resume-arg '--resume {checkpoint}' \\
      --on-stuck restart --stuck-after 5 -- python train.py"""
COLUMNS = 106
LONGEST_PAUSE_S = 0.7
CHAR_WIDTH, LINE_HEIGHT, PADDING, TOP = 7.83, 18, 16, 44
COLOURS = {"31": "#f38ba8", "32": "#a6e3a1", "33": "#f9e2af", "34": "#89b4fa", "35": "#cba6f7", "36": "#94e2d5"}
BUTTONS = ("31", "33", "32")
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
PLAIN, PAPER = "#cdd6f4", "#1e1e2e"
_PARTS = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b[^\[]|\r|\n|[^\x1b\r\n]+")

Span = tuple[str, str]  # style, text


@dataclass
class Screen:
    """A terminal that only grows: carriage return, erasing, cursor up, colours, wrapping."""

    rows: list[list[Span]] = field(default_factory=lambda: [[]])  # cells: one character each
    row: int = 0
    column: int = 0
    style: str = ""

    def feed(self, text: str) -> None:
        for part in _PARTS.finditer(text):
            if part[2] == "m":
                self.style = "" if part[1] in ("", "0") else f"{self.style};{part[1]}".strip(";")
            elif part[2]:
                self._control(part[2], int(part[1] or 0) if part[1].isdigit() or not part[1] else 0)
            elif part[0] == "\r":
                self.column = 0
            elif part[0] == "\n":
                self._down()
            elif not part[0].startswith("\x1b"):
                for sign in part[0]:
                    self._put(sign)

    def _control(self, letter: str, number: int) -> None:
        if letter == "A":
            self.row = max(0, self.row - (number or 1))
        elif letter == "K":
            self.rows[self.row] = [] if number == 2 else self.rows[self.row][: self.column]
        elif letter == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            for below in range(self.row + 1, len(self.rows)):
                self.rows[below] = []

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def _put(self, sign: str) -> None:
        if self.column >= COLUMNS:
            self.column = 0
            self._down()
        cells = self.rows[self.row]
        cells.extend([("", " ")] * (self.column + 1 - len(cells)))
        cells[self.column] = (self.style, sign)
        self.column += 1


@dataclass
class Version:
    """What stood on a row from `from_s` until `until_s`; to the end when that is None."""

    row: int
    cells: tuple[Span, ...]
    from_s: float
    until_s: float | None = None


def record(argv: Sequence[str], folder: Path, env: dict[str, str]) -> list[tuple[float, str]]:
    """What the command prints on a terminal, with times."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(argv[0], list(argv), env)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    began_s = time.monotonic()
    chunks: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            break
        text = (rest + data).decode("utf-8", "ignore")
        rest = (rest + data)[len(text.encode()) :]
        chunks.append((time.monotonic() - began_s, text))
    os.close(terminal)
    os.waitpid(pid, 0)
    return chunks


def play(chunks: Sequence[tuple[float, str]], typed: str) -> list[Version]:
    """Every version of every row, with pauses shortened."""
    screen, shown, done = Screen(), {}, []  # type: ignore[var-annotated]
    at_s, last_s = 0.0, 0.0
    for printed_s, text in [(0.0, f"\x1b[1m$ {typed.replace(chr(10), chr(13) + chr(10))}\x1b[0m\r\n"), *chunks]:
        at_s += min(LONGEST_PAUSE_S, printed_s - last_s)
        last_s = printed_s
        screen.feed(text)
        for row, cells in enumerate(screen.rows):
            new = tuple(cells)
            old = shown.get(row)
            if old is not None and old.cells == new:
                continue
            if old is not None:
                old.until_s = at_s
            shown[row] = Version(row, new, at_s)
            done.append(shown[row])
    return [version for version in done if "".join(sign for _, sign in version.cells).strip()]


def last_screen(versions: Sequence[Version]) -> str:
    rows = {one.row: "".join(sign for _, sign in one.cells).rstrip() for one in versions if one.until_s is None}
    return "\n".join(rows.get(row, "") for row in range(max(rows) + 1)) + "\n"


def structure(text: str) -> list[str]:
    """Its lines without what differs from run to run: numbers, names, places. The same shape again is one line."""
    lines: list[str] = []
    for line in re.sub(r"\n {11,}", " ", text).splitlines():  # a wrapped line is one line
        plain = re.sub(r"train-[0-9a-f]+", "RUN", line)
        plain = re.sub(r"\d[\d.,:]*( (ms|s|min|h|B|KiB|MiB|GiB|TiB|%)\b)?", "N", plain)
        plain = re.sub(r"\(limit [^)]*\)", "(limit)", plain)
        if not lines or lines[-1] != plain:
            lines.append(plain)
    return lines


def draw(versions: Sequence[Version], title: str) -> str:
    num_rows = max(version.row for version in versions) + 1
    width, height = round(COLUMNS * CHAR_WIDTH + 2 * PADDING), TOP + num_rows * LINE_HEIGHT + PADDING
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        f'  xml:space="preserve" role="img" aria-label="{escape(title)}">',
        f"<style>text{{font:13px {FONTS};white-space:pre}}",
        "@keyframes in{from{opacity:0}}@keyframes brief{from,to{opacity:1}}.t{opacity:0}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        *(f'<circle cx="{22 + 20 * at}" cy="22" r="6" fill="{COLOURS[mark]}"/>' for at, mark in enumerate(BUTTONS)),
    ]
    for version in versions:
        y = TOP + (version.row + 0.75) * LINE_HEIGHT
        if version.until_s is None:
            shown = f'style="animation:in .01s steps(1) {version.from_s:.1f}s backwards"'
        else:
            length_s = max(0.05, version.until_s - version.from_s)
            shown = f'class="t" style="animation:brief {length_s:.2f}s {version.from_s:.2f}s"'
        lines.append(f'<text x="{PADDING}" y="{y:g}" fill="{PLAIN}" {shown}>{_spans(version.cells)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _spans(cells: Sequence[Span]) -> str:
    runs: list[list[str]] = []
    for style, sign in cells:
        if runs and runs[-1][0] == style:
            runs[-1][1] += sign
        else:
            runs.append([style, sign])
    return "".join(_span(style, text) for style, text in runs)


def _span(style: str, text: str) -> str:
    marks = style.split(";")
    colour = next(
        (COLOURS[mark[-2:].replace("9", "3", 1)] for mark in marks if mark[-2:].replace("9", "3", 1) in COLOURS), ""
    )
    wanted = f' fill="{colour}"' if colour else ""
    wanted += ' font-weight="bold"' if "1" in marks else ""
    wanted += ' fill-opacity=".6"' if "2" in marks else ""
    body = escape(text, quote=False)
    return f"<tspan{wanted}>{body}</tspan>" if wanted else body


def make_scene(folder: Path) -> tuple[Path, dict[str, str]]:
    """A person's project in `folder`, and a shell whose `jackline` and `python` are those that run this."""
    project, programs = folder / "p", folder / "bin"
    shutil.copytree(FOLDER / "project", project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "ckpt").mkdir()
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    (programs / "jackline").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jackline "$@"\n')
    (programs / "jackline").chmod(0o755)
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("JACKLINE", "NO_COLOR"))}
    env = {
        **keep,
        "PATH": f"{programs}:{keep['PATH']}",
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    return project, env


def film(command: str) -> list[Version]:
    # Lines are wrapped where the screen ends, so the folder's name is always equally long.
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        project, env = make_scene(Path(folder))
        chunks = record(shlex.split(command.replace("\\\n", " ")), project, env)
    # The folder's name is long and says nothing.
    return play([(at_s, text.replace(str(project), "~/project")) for at_s, text in chunks], command)


def main() -> None:
    versions = film(COMMAND)
    (FOLDER / "run.svg").write_text(
        draw(versions, "jackline run: a crash is explained, the run resumes, a hang is named")
    )
    (FOLDER / "run.txt").write_text(last_screen(versions))
    print(last_screen(versions), end="")


if __name__ == "__main__":
    main()

"""`jackline report`: a run as one file to read or to send; for a run that failed, a post-mortem.

Owns the picture of `--png`: a browser that is installed here draws the same page, without a network.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import price_option, run_argument, runs_dir_option
from jackline.cli.text.safety import safe_text
from jackline.cli.view import run_view
from jackline.errors import JacklineError, UsageError
from jackline.units import format_bytes

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
    "brave-browser",
)
PICTURE_WIDTH, MOST_PIXELS = 900, 16_000
PATIENCE_S = 120.0
_MEASURE = "document.title = 'high:' + document.documentElement.scrollHeight"


@click.command(short_help="One file that tells what a run did; for a failure, a post-mortem.")
@run_argument
@click.option(
    "--out", type=click.Path(), help="The file to write; '-' is standard output. Default: NAME-report.html."
)
@click.option("--md", "as_markdown", is_flag=True, help="Markdown instead of HTML, for an issue or a chat.")
@click.option("--png", "as_picture", is_flag=True, help="A picture of the page; needs chromium or Chrome.")
@price_option
@runs_dir_option
def command(
    run: str | None, out: str | None, as_markdown: bool, as_picture: bool, price: float | None, runs_dir: str | None
) -> None:
    """Write what RUN did, how it ended, where the time went and what its curves look like, into one file.

    The file needs no network, runs no script, and can be opened anywhere, also on a phone. Tokens, passwords, user
    info in addresses and home folders are hidden; read it before you send it to a stranger.
    """
    from jackline.review.document import to_html, to_markdown
    from jackline.review.report import make_report
    from jackline.review.summary import summarise

    if as_markdown and as_picture:
        raise UsageError("--md and --png exclude each other", hint="call it twice")
    browser = find_browser() if as_picture else ""
    found = find_to_read(run, runs_dir)
    document = make_report(summarise(found, now_s=run_view.wall_clock_s()), price)
    text = to_markdown(document) if as_markdown else to_html(document)
    if out == "-" and not as_picture:
        click.echo(text, nl=False)
        return
    ending = "md" if as_markdown else "png" if as_picture else "html"
    path = Path(out or f"{found.name}-report.{ending}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"name a file: --out {path / 'report.html'}")
    if as_picture:
        path.write_bytes(take_picture(browser, text))
    else:
        path.write_text(text, encoding="utf-8", errors="replace")
    click.echo(f"{safe_text(path)}  {format_bytes(path.stat().st_size)}")


def find_browser() -> str:
    """$JACKLINE_BROWSER, else the first known one on the PATH."""
    chosen = os.environ.get("JACKLINE_BROWSER")
    found = next(filter(None, map(shutil.which, [chosen] if chosen else BROWSERS)), None)
    if found is None:
        missing = f"there is no '{chosen}'" if chosen else f"none of {', '.join(BROWSERS)} is installed"
        hint = "apt install chromium, or set JACKLINE_BROWSER; without --png the report is a page for any browser"
        raise UsageError(f"--png needs a browser, and {missing}", hint=hint)
    return found


def take_picture(browser: str, page: str) -> bytes:
    """The whole page as PNG. A browser draws only what its window shows, so the page is measured first."""
    with tempfile.TemporaryDirectory(prefix="jackline-") as folder:
        source, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        digest = base64.b64encode(hashlib.sha256(_MEASURE.encode()).digest()).decode()
        allowed = page.replace("default-src 'none';", f"default-src 'none'; script-src 'sha256-{digest}';", 1)
        measured = allowed.replace("</body>", f"<script>{_MEASURE}</script></body>")
        source.write_text(measured, encoding="utf-8", errors="replace")
        seen = _browse(browser, folder, "--dump-dom", source.as_uri())
        match = re.search(r"<title>high:(\d+)</title>", seen)
        high = min(MOST_PIXELS, int(match[1])) if match else 4000
        source.write_text(page, encoding="utf-8", errors="replace")
        _browse(browser, folder, f"--screenshot={picture}", source.as_uri(), high=high)
        try:
            return picture.read_bytes()
        except OSError:
            raise JacklineError(f"{browser} drew no picture", hint="without --png the report is a page") from None


def _browse(browser: str, folder: str, act: str, address: str, *, high: int = 1000) -> str:
    words = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage"]
    words += [f"--user-data-dir={folder}/profile", f"--window-size={PICTURE_WIDTH},{high}", act, address]
    if os.geteuid() == 0:
        words.insert(1, "--no-sandbox")  # it refuses to start as root otherwise; the page is ours and runs nothing
    env = {**os.environ, "HOME": folder}
    try:
        done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JacklineError(
            f"{browser} could not be used: {error}", hint="without --png the report is a page"
        ) from None
    return done.stdout.decode("utf-8", "replace")

"""`jackline report`: a run as one file to read or to send; for a run that failed, a post-mortem."""

from __future__ import annotations

from pathlib import Path

import click

from jackline.cli.options import find, run_argument, runs_dir_option
from jackline.cli.text.safety import safe_text
from jackline.cli.view import run_view
from jackline.errors import UsageError
from jackline.units import format_bytes


@click.command(short_help="One file that tells what a run did; for a failure, a post-mortem.")
@run_argument
@click.option(
    "--out", type=click.Path(), help="The file to write; '-' is standard output. Default: NAME-report.html."
)
@click.option("--md", "as_markdown", is_flag=True, help="Markdown instead of HTML, for an issue or a chat.")
@runs_dir_option
def command(run: str | None, out: str | None, as_markdown: bool, runs_dir: str | None) -> None:
    """Write what RUN did, how it ended, where the time went and what its curves look like, into one file.

    The file needs no network, runs no script, and can be opened anywhere, also on a phone. Tokens, passwords, user
    info in addresses and home folders are hidden; read it before you send it to a stranger.
    """
    from jackline.review.document import to_html, to_markdown
    from jackline.review.report import make_report
    from jackline.review.summary import summarise

    found = find(run, runs_dir)
    document = make_report(summarise(found, now_s=run_view.wall_clock_s()))
    text = to_markdown(document) if as_markdown else to_html(document)
    if out == "-":
        click.echo(text, nl=False)
        return
    path = Path(out or f"{found.name}-report.{'md' if as_markdown else 'html'}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"name a file: --out {path / 'report.html'}")
    path.write_text(text, encoding="utf-8", errors="replace")
    click.echo(f"{safe_text(path)}  {format_bytes(path.stat().st_size)}")

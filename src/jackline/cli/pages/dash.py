"""`jackline dash`: a page with all runs on this machine, in a browser. Reads only."""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

from jackline.cli.mirrored import folder_to_read, keep_all_renewed, mirror_of
from jackline.cli.options import price_option, runs_dir_option
from jackline.errors import JacklineError, UsageError
from jackline.extras import require

PORT = 7654
# Ports after it are tried when it is taken: one page a folder of runs is common.
TRIED = 20


@click.command(short_help="A page in the browser: all runs, curves, memory, logs. Reads only.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help=f"Default: {PORT}, or the next free one; 0: any free one."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in this machine's browser.")
@click.option(
    "--behind-proxy",
    "proxy_hosts",
    multiple=True,
    metavar="HOST",
    help="Host under which a notebook's proxy shows the page; '*.example.org' for any below it.",
)
@click.option("--new-token", is_flag=True, help="Make a new token: pages that are open lose access.")
@price_option
@runs_dir_option
def command(
    port: int | None, proxy_hosts: tuple[str, ...], price: float | None, runs_dir: str | None, **given: bool
) -> None:
    """Serve a page that shows the runs of the runs folder and those registered from other folders.

    It listens on 127.0.0.1 only and changes nothing: no button stops or deletes a run. The address it prints holds a
    token behind the #; without it nobody on this machine, and no web page, can read the runs. From another machine:
    ssh -L 7654:127.0.0.1:7654 HOST, then open the same address there. Ctrl-C ends it; runs are not affected.
    """
    from jackline.dashboard.guard import NAME, Rules, is_proxy_host, read_token
    from jackline.dashboard.server import PACKAGES, listen, make_app, serve
    from jackline.rundir.registry import state_folder

    require("`jackline dash`", "dash", PACKAGES)
    for host in proxy_hosts:
        if not is_proxy_host(host):
            raise UsageError(
                f"--behind-proxy takes a host, not '{host}'",
                hint="write the part between :// and the next /, such as hub.example.org or '*.example.org'",
            )
    try:
        token = read_token(state_folder(), is_new=given["new_token"])
    except OSError as error:
        raise JacklineError(f"cannot keep a token in {state_folder() / NAME}: {error.strerror}") from None
    listening = _listen(listen, port)
    taken = listening.getsockname()[1]
    folder = folder_to_read(runs_dir)
    address = f"http://127.0.0.1:{taken}/#token={token}"
    print(f"jackline dash: the runs of {mirror_of(runs_dir) or folder}", file=sys.stderr)
    keep_all_renewed(runs_dir)
    click.echo(address)
    for host in proxy_hosts:
        print(f"through the proxy: add #token={token} to its address of port {taken} ({host})", file=sys.stderr)
    print("Ctrl-C ends the page; the runs continue", file=sys.stderr)
    sys.stdout.flush()
    if given["opens"]:
        import webbrowser

        webbrowser.open_new_tab(address)
    from jackline.cli.pages.told import RunTeller
    from jackline.dashboard.views import Site

    serve(make_app(Site(folder, RunTeller(), price), Rules(token, taken, proxy_hosts)), listening)


def _listen(listen: Any, port: int | None) -> Any:
    for number in range(PORT, PORT + TRIED) if port is None else (port,):
        try:
            return listen(number)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise JacklineError(f"cannot listen on 127.0.0.1:{number}: {error.strerror}") from None
    what = f"port {port} is" if port is not None else f"ports {PORT} to {PORT + TRIED - 1} are"
    raise UsageError(f"{what} taken, or not allowed for you", hint="jackline dash --port 0 takes a free one")

"""`jackline mcp`: a read-only MCP server on stdin and stdout with four tools: runs, status, why, wait.

Owns the tools and their bounds; the answers are those of the commands. Starting and stopping runs is left to the
command line, where a person sees it. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import jackline
from jackline.cli.mirrored import folder_to_read, keep_all_renewed
from jackline.cli.options import runs_dir_option
from jackline.cli.programs.conditions import parse_conditions
from jackline.cli.programs.numbers import MetricsTail
from jackline.cli.programs.verdict import look, verdict_json
from jackline.cli.programs.wait import wait_for
from jackline.errors import JacklineError
from jackline.extras import require
from jackline.rundir.find import find_run, list_runs
from jackline.rundir.layout import RunDir

T = TypeVar("T")
MAX_RUNS = 50
MAX_WHY_CHARS = 4000
WHY_LIMIT_S = 120.0
LONGEST_WAIT_S = 3600.0
_BRIEF = ("run", "path", "state", "attempt", "text", "verdict", "step", "total", "eta_s")
_ABOUT = (
    "Training runs supervised by Jackline on this machine. Read-only. `wait` blocks until a run ends, hangs or gets "
    "far enough: prefer it to polling. Start runs in a shell: jackline run --detach --json -- COMMAND"
)


@click.command(short_help="An MCP server on stdio: runs, status, why, wait. Read-only.")
@runs_dir_option
def command(runs_dir: str | None) -> None:
    """Serve four read-only tools to a coding agent over stdin and stdout, until stdin is closed.

    \b
    claude mcp add jackline -- jackline mcp
    {"mcpServers": {"jackline": {"command": "jackline", "args": ["mcp"]}}}

    Needs the extra: pip install "jackline[mcp]".
    """
    require("`jackline mcp`", "mcp", ("mcp",))
    folder = folder_to_read(runs_dir)
    keep_all_renewed(runs_dir)
    make_server(folder).run("stdio")


def make_server(folder: Path) -> Any:
    """The server with its tools; `folder` is where runs are looked for first."""
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    # By the names of the protocol: those of the SDK's fields differ between its versions.
    read_only = ToolAnnotations.model_validate({"readOnlyHint": True, "openWorldHint": False})
    server = MCPServer("jackline", instructions=_ABOUT, version=jackline.__version__)
    tool = server.tool(annotations=read_only, structured_output=False)

    async def runs(limit: int = 10) -> str:
        """The newest runs, each with state, step, total, eta_s and one sentence."""
        return await in_thread(lambda: _json(list_json(folder, limit)))

    async def status(run: str | None = None) -> str:
        """How a run is now: state, verdict, step, metrics, time left, what a crash would lose. Without a name: the
        only live run, else the newest."""
        return await in_thread(lambda: _json(status_json(find_in(folder, run))))

    async def why(run: str | None = None) -> str:
        """What a live run is doing, by file and line, with stacks; why an ended run ended, from evidence, and what to
        do next."""
        return await in_thread(lambda: why_text(find_in(folder, run)))

    async def wait(run: str | None = None, until: str = "ended,stuck", timeout_s: float = 50.0) -> str:
        """Wait until a condition holds, the run is over, or `timeout_s` have passed (at most 3600). Conditions, with
        commas between them: ended, finished, stopped, dead, stuck, suspect, paused, restarted, nan, step=N, epoch=N,
        loss<2.5."""
        conditions = parse_conditions([until])
        limit_s = min(max(0.0, timeout_s), LONGEST_WAIT_S)
        return await in_thread(lambda: _json(wait_for(find_in(folder, run), conditions, limit_s)[0]))

    for function in (runs, status, why, wait):
        tool(told(function))
    return server


def told(function: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
    """The tool, whose errors for people reach the agent with their hint; the SDK hides the text of all others."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(function)
    async def called(*words: Any, **named: Any) -> str:
        try:
            return await function(*words, **named)
        except JacklineError as error:
            raise ToolError(str(error)) from None

    return called


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread that does not hold the process when the client goes away."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, *outcome)

    threading.Thread(target=run, name="jackline-tool", daemon=True).start()
    return await done


def find_in(folder: Path, run: str | None) -> RunDir:
    return find_run(run, folder, is_read_only=True)


def list_json(folder: Path, limit: int) -> dict[str, Any]:
    found = list_runs(folder)
    shown = found[: min(max(1, limit), MAX_RUNS)]
    entries = [{name: status_json(run)[name] for name in _BRIEF} for run in shown]
    return {"schema": "jackline.runs/1", "runs": entries, "num_not_shown": len(found) - len(shown)}


def status_json(run: RunDir) -> dict[str, Any]:
    return verdict_json(look(run), MetricsTail(run).latest, None, is_timeout=False, waited_s=0.0)


def why_text(run: RunDir) -> str:
    """What `jackline why` prints, in a process of its own: it may read the stacks of the run's processes."""
    argv = [sys.executable, "-m", "jackline", "why", str(run.path)]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=WHY_LIMIT_S
    )
    text = done.stdout.strip() or done.stderr.strip()
    if len(text) <= MAX_WHY_CHARS:
        return text
    half = MAX_WHY_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

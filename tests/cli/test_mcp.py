"""`jackline mcp` as a coding agent meets it: the official client over stdin and stdout, against a real run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.cli.programs.verdict import SCHEMA
from tests.deadline import HANGS_S
from tests.docs.json_reference import check_answer
from tests.shell import Shell

# The client leaves a memory stream to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # Looked for and not imported: that takes a second in each worker, for the few tests below.
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the extra `mcp` is not installed"),
    pytest.mark.xdist_group("mcp"),
]

GOLDEN = Path(__file__).parents[1] / "golden"
COUNTS = """
import os, time
number = 0
while not os.path.exists("go"):
    number += 1
    print(f"step {number}/100000", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    person = Shell(tmp_path / "person")
    yield person
    person.close()


def ask(shell: Shell, questions: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `questions(client)` returns, with a server of its own."""

    async def talk() -> Any:
        words = ["-m", "jackline", "mcp", "--runs-dir", str(shell.runs)]
        import mcp

        server = mcp.StdioServerParameters(command=sys.executable, args=words, env=shell.env, cwd=str(shell.work))
        async with mcp.Client(mcp.stdio_client(server)) as client:
            return await questions(client)

    return asyncio.run(asyncio.wait_for(talk(), HANGS_S))


def text_of(result: Any) -> str:
    assert len(result.content) == 1
    return str(result.content[0].text)


def test_an_agent_follows_a_run_to_its_end_with_the_four_tools(shell: Shell) -> None:
    shell.jackline("run", "--detach", "--json", "--name", "seen", "--", *shell.python("train.py", COUNTS))

    async def questions(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"runs", "status", "why", "wait"}
        assert all(tool.description and tool.annotations.read_only_hint for tool in tools.values())
        answer = json.loads(text_of(await client.call_tool("wait", {"run": "seen", "until": "step=3"})))
        check_answer(SCHEMA, answer)
        assert (answer["met"], answer["state"]) == ("step=3", "alive")
        listed = json.loads(text_of(await client.call_tool("runs", {})))
        assert [(run["run"], run["state"]) for run in listed["runs"]] == [("seen", "alive")]
        assert "train.py:" in text_of(await client.call_tool("why", {"run": "seen"}))
        # A second question is answered while the first one waits.
        waiting = asyncio.create_task(client.call_tool("wait", {"run": "seen", "timeout_s": HANGS_S}))
        status = json.loads(text_of(await client.call_tool("status", {})))
        check_answer(SCHEMA, status)
        assert status["run"] == "seen" and not waiting.done()
        (shell.work / "go").touch()
        ended = json.loads(text_of(await waiting))
        assert (ended["met"], ended["state"], ended["exit_code"]) == ("ended", "finished", 0)

    ask(shell, questions)


def test_a_wrong_question_is_an_error_with_a_hint_and_the_server_lives_on(shell: Shell) -> None:
    shutil.copytree(GOLDEN / "format1-killed-oom", shell.runs / "killed")

    async def questions(client: Any) -> None:
        wrong = await client.call_tool("status", {"run": "kiled"})
        assert wrong.is_error and "hint: did you mean" in text_of(wrong)
        wrong = await client.call_tool("wait", {"run": "killed", "until": "stuk"})
        assert wrong.is_error and "hint: did you mean 'stuck'?" in text_of(wrong)
        why = text_of(await client.call_tool("why", {"run": "killed"}))
        assert "out of memory" in why and len(why) <= 4100

    ask(shell, questions)


def test_the_server_ends_with_its_client_even_while_somebody_waits(shell: Shell) -> None:
    shell.jackline("run", "--detach", "--json", "--name", "long", "--", *shell.python("train.py", COUNTS))
    server = subprocess.Popen(
        [sys.executable, "-m", "jackline", "mcp", "--runs-dir", str(shell.runs)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **shell.env},
    )  # fmt: skip
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    call = {"name": "wait", "arguments": {"run": "long", "timeout_s": 3600}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
    ]
    assert server.stdin is not None and server.stdout is not None
    for message in messages:
        server.stdin.write(json.dumps(message).encode() + b"\n")
    server.stdin.flush()
    assert json.loads(server.stdout.readline())["id"] == 1
    _, err = server.communicate(timeout=HANGS_S)  # closes its stdin
    assert (server.returncode, err) == (0, b"")

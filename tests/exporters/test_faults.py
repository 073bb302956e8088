"""Senders under faults: servers that hang, drop, fail and die, senders that are killed, a run that is resumed."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socket
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import HANGS_S
from tests.shell import Live, RunFiles, Shell, wait_for

SHAPES = ("webhook", "ntfy", "slack")
TOLD = ["crashed", "resumed", "done"]
# Crashes at first; then it waits for the test before it goes on.
SCRIPT = """
import time
from pathlib import Path

def wait(name):
    while not Path(name).exists():
        time.sleep(0.02)

def train(*steps):
    for step in steps:
        print(f"step {step}/10 loss {1 / step:.3f}", flush=True)

if not Path("crashed").exists():
    train(1, 2, 3, 4, 5)
    Path("crashed").touch()
    raise SystemExit(3)
train(6)
wait("one")
train(7, 8)
wait("two")
train(9, 10)
"""


class Faulty:
    """A server that treats each message as `plans` says: accept, fail (500), drop (no answer) or hang. It keeps its
    port while it is dead, so that nobody else is asked."""

    def __init__(self) -> None:
        self.plans: dict[str, list[str]] = defaultdict(list)
        self.accepted: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.hanging: set[str] = set()
        self._holder = self._bind(0)
        self.port = int(self._holder.getsockname()[1])
        self._server: http.server.ThreadingHTTPServer | None = None
        self._released = threading.Event()
        self.live()

    def _bind(self, port: int) -> socket.socket:
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(("127.0.0.1", port))
        return found

    def live(self) -> None:
        faulty = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                plan = faulty.plans[self.path].pop(0) if faulty.plans[self.path] else "accept"
                if plan == "hang":
                    faulty.hanging.add(self.path)
                    faulty._released.wait(HANGS_S)
                if plan in ("hang", "drop"):
                    self.close_connection = True
                    return
                if plan == "accept":
                    faulty.accepted[self.path].append(body)
                self.send_response(200 if plan == "accept" else 500)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = self._bind(self.port)
        server.server_activate()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._server = server

    def die(self) -> None:
        if self._server is not None:
            self._released.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        self.die()
        self._holder.close()


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    found = Faulty()
    yield found
    found.close()


def start_senders(shell: Shell, faulty: Faulty) -> list[Live]:
    targets = [f"{shape}:http://127.0.0.1:{faulty.port}/{shape}" for shape in SHAPES]
    targets[1] += "/topic"  # which ntfy wants in the body: the message itself is posted to the server
    return [shell.start("send", "mine", "--to", target) for target in targets]


def records_of(run: RunFiles) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (run.path / "exports").glob("*.json")]


def kill(live: Live) -> None:
    os.kill(live.pid, signal.SIGKILL)
    assert live.wait() == -signal.SIGKILL


@pytest.mark.zoo
def test_every_message_arrives_once_whatever_fails_and_the_run_does_not_notice(shell: Shell, faulty: Faulty) -> None:
    run, paths = shell.run_dir("mine"), [f"/{shape}" for shape in SHAPES]
    start = ["run", "--name", "mine", "--detach", "--", *shell.python("train.py", SCRIPT)]
    assert shell.jackline(*start).code == 0
    run.wait_until_over()
    assert shell.jackline(*start).code == 0  # resumes it
    wait_for(lambda: "step 6" in run.log(), "the second attempt")
    for path in paths:
        faulty.plans[path] = ["drop", "fail", "accept", "hang"]
    senders = start_senders(shell, faulty)
    wait_for(lambda: all(faulty.accepted[path] for path in paths), "the first message, by every way")
    wait_for(
        lambda: len(found := records_of(run)) == 3 and all(one.get("watched_attempt") == 2 for one in found),
        "the senders to see attempt 2",
    )
    (shell.work / "one").touch()
    wait_for(lambda: faulty.hanging == set(paths), "the second message, which hangs")
    for sender in senders:
        kill(sender)
    faulty.die()
    again = start_senders(shell, faulty)
    for sender in again:
        sender.wait_for("could not send")
    (shell.work / "two").touch()
    run.wait_until_over()
    assert run.exit(2)["exit_code"] == 0
    assert [line.split()[1] for line in run.log_lines()] == [f"{step}/10" for step in range(1, 11)]
    faulty.live()
    assert [sender.wait() for sender in again] == [0, 0, 0], [sender.text() for sender in again]
    said = {path: [str(body.get("title") or body["text"]) for body in faulty.accepted[path]] for path in paths}
    assert [body["event"] for body in faulty.accepted["/webhook"]] == TOLD
    assert len({body["id"] for body in faulty.accepted["/webhook"]}) == 3
    for path in ("/ntfy", "/slack"):
        assert [re.findall(r"mine: (\w+)", text)[0] for text in said[path]] == TOLD, said
    before = {path: len(found) for path, found in faulty.accepted.items()}
    assert [sender.wait() for sender in start_senders(shell, faulty)] == [0, 0, 0]
    assert before == {path: len(found) for path, found in faulty.accepted.items()}


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
        return str(answer.read().decode())


@pytest.mark.zoo
def test_idle_clients_and_a_kill_of_the_metrics_server_hold_up_neither_prometheus_nor_the_run(shell: Shell) -> None:
    Path(shell.work / "crashed").touch()
    start = ["run", "--name", "mine", "--detach", "--", *shell.python("train.py", SCRIPT)]
    assert shell.jackline(*start).code == 0
    run = shell.run_dir("mine")
    wait_for(lambda: "step 6" in run.log(), "a step")
    for number in range(2):
        server = shell.start("send", "--to", "prometheus:0")
        server.wait_for("/metrics (Ctrl-C ends it)")
        (url,) = re.findall(r"http://\S+/metrics", server.text())
        port = int(url.rpartition(":")[2].partition("/")[0])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        idle[0].sendall(b"GET /metrics HT")  # and never more
        assert 'jackline_run_state{run="mine",state="alive"} 1\n' in scrape(url)
        text = wait_for(lambda url=url: found if 'run_step{run="mine"} 6\n' in (found := scrape(url)) else "", "6")
        names = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(names) == len(set(names)) and text.endswith("# EOF\n")
        if number == 0:
            kill(server)
        else:
            server.press_ctrl_c()
            assert server.wait() == 0
        for one in idle:
            one.close()
    for name in ("one", "two"):
        (shell.work / name).touch()
    run.wait_until_over()
    assert run.exit(1)["exit_code"] == 0

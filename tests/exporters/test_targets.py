"""`jackline send`: as a person types it, to real servers on this machine."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.exporters.messages import shape_message
from jackline.exporters.openmetrics import GAUGES, MetricsServer, to_text
from jackline.exporters.reader import About, Message
from jackline.rundir.layout import RunDir
from tests.rundir.made import make_run, this_process, write_start, write_state
from tests.shell import Shell

GOLDEN = Path(__file__).parents[1] / "golden"


class Listener:
    """A server that notes what is posted and answers as told."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.codes: list[int] = []
        listener = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code = listener.codes.pop(0) if listener.codes else 200
                if code == 200:
                    listener.got.append({"path": self.path, "key": self.headers["Idempotency-Key"], **body})
                self.send_response(code)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def finished(shell: Shell) -> str:
    shutil.copytree(GOLDEN / "format1-finished", shell.runs / "format1-finished")
    return "format1-finished"


def test_a_message_reaches_a_webhook_once_also_after_a_failure(
    shell: Shell, listener: Listener, finished: str
) -> None:
    listener.codes = [503]
    shell.env["HOOK"] = f"{listener.url}/secret-path"
    done = shell.jackline("send", finished, "--to", "webhook:env:HOOK")
    assert done.code == 0, done
    assert "HTTP 503" in done.err and "secret-path" not in done.err
    (message,) = listener.got
    assert (message["event"], message["text"], message["path"]) == (
        "done",
        "finished after 3 h 12 min",
        "/secret-path",
    )
    assert message["key"] == message["id"] and message["schema"] == "jackline.message/1"
    assert shell.jackline("send", finished, "--to", "webhook:env:HOOK", "--once").code == 0
    assert len(listener.got) == 1
    stored = "".join(path.read_text() for path in (shell.runs / finished / "exports").iterdir())
    assert "secret-path" not in stored
    listener.codes = [302]  # to somebody else: not followed, and not tried again
    other = shell.jackline("send", finished, "--to", f"slack:{listener.url}/other")
    assert (other.code, len(listener.got)) == (
        0,
        1,
    ) and "not accepted, and not tried again: done: HTTP 302" in other.err


def test_every_shape_of_a_message_says_run_event_text_and_step() -> None:
    about = About("f00", "mine")
    message = Message(
        "1d", "stuck", "waiting for a lock", 5.0, 2, 41.0, 100.0, {"loss": 2.31416, "bad": float("nan")}
    )
    assert shape_message("slack", "https://x/y", about, message) == (
        "https://x/y",
        {"text": "*mine: stuck*\nwaiting for a lock\nstep 41 of 100, loss 2.314, bad nan"},
    )
    url, body = shape_message("ntfy", "https://ntfy.sh/topic", about, message)
    assert (url, body["topic"], body["priority"], body["sequence_id"]) == ("https://ntfy.sh", "topic", 4, "1d")
    json.dumps(shape_message("webhook", "https://x", about, message)[1], allow_nan=False)


WRONG = {
    ("--to", "carrier-pigeon:x"): "error: there is no target 'carrier-pigeon'\nhint: one of prometheus, textfile,",
    ("--to", "slack"): "error: slack needs an address\nhint: --to slack:URL\n",
    ("--to", "slack:env:NOT_SET"): "error: the environment variable NOT_SET is not set\nhint: export NOT_SET=...\n",
    ("--to", "webhook:ftp://x"): "error: webhook needs an address that begins with https://\nhint: --to webhook:",
    ("--to", "ntfy:x", "--events", "birthday"): "error: there is no message 'birthday'\nhint: one of stuck, crashed,",
    ("--to", "prometheus:web"): "error: 'web' is not a port\nhint: --to prometheus:9464\n",
}


def test_a_wrong_target_is_named(shell: Shell, finished: str) -> None:
    for words, text in WRONG.items():
        done = shell.jackline("send", finished, *words)
        assert done.code == 2 and done.err.startswith(text), done


def alive(folder: Path, **facts: Any) -> RunDir:
    run = make_run(folder)
    write_start(run, this_process())
    progress = {"done": 40, "total": 100, "unit": "steps", "rate_per_s": 2.0, "eta_s": 30.0}
    state: dict[str, Any] = {
        "attempt": 1,
        "child": this_process().to_json(),
        "progress": progress,
        "verdict": {"kind": "STUCK"},
        "printed": [{"name": 'lo"ss\n', "value": 2.5}],
        "gpu": [{"index": 0, "used_bytes": 1000, "utilisation_percent": 50}],
    }
    write_state(run, this_process(), **{**state, **facts})
    return run


def test_openmetrics_text_is_complete_and_names_are_escaped(tmp_path: Path) -> None:
    run = alive(tmp_path / 'my"run')
    damaged = RunDir(tmp_path / "damaged")
    damaged.path.mkdir()
    damaged.supervisor_file.write_text("{")
    text = to_text([damaged, run], 1e9)
    lines = text.splitlines()
    assert text.endswith("\n# EOF\n") and lines.count("# EOF") == 1
    assert 'jackline_run_step{run="my\\"run"} 40' in lines
    assert 'jackline_run_verdict{run="my\\"run",verdict="STUCK"} 1' in lines
    assert 'jackline_run_state{run="my\\"run",state="alive"} 1' in lines
    assert 'jackline_run_metric{run="my\\"run",name="lo\\"ss "} 2.5' in lines
    assert 'jackline_run_gpu_memory_bytes{run="my\\"run",gpu="0"} 1000' in lines
    for name in GAUGES:  # samples of one name stand together, below their type
        places = [at for at, line in enumerate(lines) if line.startswith(f"{name}{{")]
        if places:
            assert places == list(range(places[0], places[-1] + 1))
            assert lines[places[0] - 2] == f"# TYPE {name} gauge"


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Runs of other folders are found too, and Prometheus drops samples that it has twice."""
    runs = [alive(tmp_path / "one" / "mine"), alive(tmp_path / "two" / "mine"), alive(tmp_path / "two" / "other")]
    names = [line.rpartition(" ")[0] for line in to_text(runs, 1e9).splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names))
    assert f'jackline_run_step{{run="mine",folder="{tmp_path / "two"}"}}' in names
    assert 'jackline_run_step{run="other"}' in names


def test_prometheus_is_answered_on_loopback_and_nothing_else_is(tmp_path: Path) -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: [alive(tmp_path / "mine")])
    server.serve_in_thread()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            assert b'jackline_run_step{run="mine"} 40' in answer.read()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/../run.json")
        assert error.value.code == 404
        error.value.close()
        for host, code in (("evil.example:9464", 403), ("localhost:1", 200), ("[::1]", 200), ("", 403)):
            asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Host": host})
            try:
                with urllib.request.urlopen(asked) as answer:
                    found = answer.status
            except urllib.error.HTTPError as refusal:
                found = refusal.code
                refusal.close()
            assert found == code, host
    finally:
        server.close()


def test_a_file_for_node_exporter_is_written_whole(shell: Shell, finished: str) -> None:
    path = shell.work / "jackline.prom"
    done = shell.jackline("send", finished, "--to", f"textfile:{path}")
    assert done.code == 0, done
    assert 'jackline_run_exit_code{run="format1-finished"} 0' in path.read_text()
    assert shell.jackline("send", finished, "--to", "prometheus", "--once").out == path.read_text()

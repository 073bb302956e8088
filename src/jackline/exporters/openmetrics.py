"""The state of runs in the OpenMetrics text format, for Prometheus: served on this machine, or as a file.

Gauges of the moment, read when they are asked for, so nothing can be doubled. Only the standard library.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jackline.review.redact import redact
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import read_session
from jackline.rundir.status import RunStatus, read_status

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
STATES = ("alive", "unwatched", "finished", "stopped", "dead", "elsewhere", "empty")
VERDICTS = ("PROGRESS", "BUSY", "WAITING", "PAUSED", "SUSPECT", "STUCK")
MAX_RUNS, MAX_METRICS = 200, 50
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# name -> help. The order in which they are printed.
GAUGES = {
    "jackline_run_state": "1 for the state that the run is in.",
    "jackline_run_verdict": "1 for the verdict on a live run.",
    "jackline_run_attempt": "Number of the last attempt.",
    "jackline_run_exit_code": "Exit code of a run that is over.",
    "jackline_run_step": "Steps done.",
    "jackline_run_steps_total_planned": "Steps in all, where that is known.",
    "jackline_run_steps_per_second": "Steps a second.",
    "jackline_run_eta_seconds": "Time left.",
    "jackline_run_time_limit_seconds": "Time left until the run is stopped or the platform ends it.",
    "jackline_run_heartbeat_age_seconds": "Time since the supervisor's last heartbeat.",
    "jackline_run_checkpoint_step": "Step of the newest checkpoint.",
    "jackline_run_checkpoint_age_seconds": "Age of the newest checkpoint.",
    "jackline_run_at_risk_seconds": "Work that a crash would lose now.",
    "jackline_run_host_memory_bytes": "Host memory in use under the run's limit.",
    "jackline_run_host_memory_limit_bytes": "Limit of host memory.",
    "jackline_run_gpu_memory_bytes": "GPU memory in use.",
    "jackline_run_gpu_utilisation_percent": "How busy a GPU is.",
    "jackline_run_metric": "Newest value of a metric that the training logs or prints.",
}
Sample = tuple[str, dict[str, str], float]


def samples_of(run: RunDir, now_s: float) -> Iterator[Sample]:
    status, session = read_status(run, now_s=now_s), read_session(run)
    state = status.supervisor_state
    is_live = status.state in ("alive", "unwatched")
    yield from (("jackline_run_state", {"state": word}, float(word == status.state)) for word in STATES)
    if is_live and state.verdict.kind:
        kind = state.verdict.kind
        yield from (("jackline_run_verdict", {"verdict": word}, float(word == kind)) for word in VERDICTS)
    progress = session.progress if session.done is not None else state.progress
    saved_s = session.last_checkpoint.at_s or state.checkpoint.at_s
    limit_s = state.time_limit.stops_at_s or state.time_limit.ends_at_s
    numbers: dict[str, float | None] = {
        "attempt": status.attempt or None,
        "exit_code": None if is_live else status.exit_code,
        "step": session.step if session.step is not None else progress.done,
        "steps_total_planned": None if progress.is_part else progress.total,
        "steps_per_second": progress.rate_per_s if is_live else None,
        "eta_seconds": progress.eta_s if is_live and not progress.is_part else None,
        "time_limit_seconds": limit_s - now_s if is_live and limit_s is not None else None,
        "heartbeat_age_seconds": _age(status, now_s) if is_live else None,
        "checkpoint_step": session.last_checkpoint.step,
        "checkpoint_age_seconds": max(0.0, now_s - saved_s) if saved_s is not None else None,
        "at_risk_seconds": session.loss_bounds.process_s if is_live else None,
        "host_memory_bytes": state.memory.used_bytes if is_live else None,
        "host_memory_limit_bytes": state.memory.limit_bytes if is_live else None,
    }
    yield from ((f"jackline_run_{name}", {}, float(value)) for name, value in numbers.items() if value is not None)
    for place, gpu in enumerate(state.gpu if is_live else ()):
        labels = {"gpu": str(gpu.index if gpu.index is not None else place)}
        if gpu.used_bytes is not None:
            yield "jackline_run_gpu_memory_bytes", labels, float(gpu.used_bytes)
        if gpu.utilisation_percent is not None:
            yield "jackline_run_gpu_utilisation_percent", labels, float(gpu.utilisation_percent)
    known = dict(session.metrics) or {
        entry.name: entry.value for entry in state.printed if entry.name and entry.value is not None
    }
    for name, value in list(known.items())[:MAX_METRICS]:
        yield "jackline_run_metric", {"name": name}, float(value)


def _age(status: RunStatus, now_s: float) -> float | None:
    return None if status.last_seen_at_s is None else max(0.0, now_s - status.last_seen_at_s)


def to_text(runs: Iterable[RunDir], now_s: float) -> str:
    """All gauges of all runs. A run that cannot be read is left out: it must not hide the others. Runs of one name in
    different folders get the folder as a label: Prometheus drops a sample that it gets twice."""
    found: dict[str, list[str]] = {name: [] for name in GAUGES}
    shown = list(runs)[:MAX_RUNS]
    named = Counter(run.name for run in shown)
    for run in shown:
        whose = {"run": run.name} | ({"folder": redact(str(run.path.parent))} if named[run.name] > 1 else {})
        try:
            samples = list(samples_of(run, now_s))
        except (OSError, ValueError, TypeError):
            continue
        for name, labels, value in samples:
            inside = ",".join(f'{key}="{_escape(text)}"' for key, text in {**whose, **labels}.items())
            found[name].append(f"{name}{{{inside}}} {_number(value)}")
    lines: list[str] = []
    for name, rows in found.items():
        if rows:
            lines += [f"# TYPE {name} gauge", f"# HELP {name} {GAUGES[name]}", *rows]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _escape(text: str) -> str:
    plain = re.sub(r"[\x00-\x1f\x7f]", " ", text.encode("utf-8", "replace").decode("utf-8"))[:200]
    return plain.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine by one of its own names."""
    return re.sub(r":\d{1,5}$", "", host.strip().lower()) in LOOPBACK


class MetricsServer:
    """Answers GET /metrics and nothing else."""

    def __init__(self, host: str, port: int, find_runs: Callable[[], Sequence[RunDir]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 20

            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                if host in LOOPBACK and not is_loopback(self.headers.get("Host", "")):
                    # A web page whose name leads to this machine: the browser would let it read the answer.
                    self.send_error(403, "ask for 127.0.0.1 or localhost")
                    return
                body = to_text(find_runs(), time.time()).encode() if is_known else b"GET /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_words: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64  # with the default of 5, a few idle clients let Prometheus wait for seconds

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])

    def serve(self) -> None:
        self._server.serve_forever()

    def serve_in_thread(self) -> None:
        threading.Thread(target=self.serve, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

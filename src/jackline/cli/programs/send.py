"""`jackline send`: a run's metrics to Prometheus, W&B, MLflow or trackio, its events to a webhook, ntfy or Slack.

Owns what TARGET means and the process in the background. A sender only reads the run's folder; the run never waits
for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from jackline.cli.options import find, run_argument, runs_dir_option
from jackline.cli.text.safety import safe_text
from jackline.errors import EXIT_DONE, EXIT_FAILED, JacklineError, UsageError
from jackline.exporters.reader import EVENTS, Reader, export_name
from jackline.exporters.sending import LIVE, POLL_S, Sending, Sink
from jackline.rundir.access.writing import folder_inside, open_own
from jackline.rundir.atomic import write_whole
from jackline.rundir.find import list_runs, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.status import read_status

TARGETS = ("prometheus", "textfile", "webhook", "ntfy", "slack", "wandb", "mlflow", "trackio")
HOST, PORT = "127.0.0.1", 9464
PROJECT = "jackline"


@click.command(short_help="Send metrics to Prometheus, W&B, MLflow, trackio; messages to ntfy, Slack, a webhook.")
@run_argument
@click.option("--to", "target", metavar="TARGET", required=True, help="Where to: see above.")
@click.option(
    "--events", metavar="LIST", help=f"Which messages: {','.join(EVENTS)}; default: all. For webhook, ntfy, slack."
)
@click.option("--once", is_flag=True, help="Send what is there now and come back.")
@click.option("--detach", is_flag=True, help="Send in the background until the run is over.")
@runs_dir_option
def command(run: str | None, target: str, events: str | None, once: bool, detach: bool, runs_dir: str | None) -> None:
    """Send what RUN records to another program, until the run is over.

    \b
    prometheus[:PORT]        GET http://127.0.0.1:9464/metrics; without RUN, every run that is found from here
                             (prometheus:HOST:PORT listens on another address)
    textfile:PATH            the same text as a file, for node_exporter
    ntfy:TOPIC  slack:URL  webhook:URL
                             a message when it is stuck, crashed, done, short of memory, or trains again
    wandb[:PROJECT]  mlflow[:EXPERIMENT|:URI]  trackio[:PROJECT]

    \b
    jackline send mine --to ntfy:my-secret-topic --detach
    jackline send mine --to slack:env:SLACK_HOOK --detach        the address is in $SLACK_HOOK
    jackline send mine --to wandb:my-project

    A sender is a process of its own: it may fail, hang or be killed, and the run does not notice. Started again it
    continues where it was; a step that is trained again after a crash is not sent again.
    """
    kind, rest = parse_target(target)
    if kind in ("prometheus", "textfile"):
        sys.exit(_show_metrics(kind, rest, run, runs_dir, once))
    found = find(run, runs_dir)
    wanted = parse_events(events)
    if detach:
        _detach(found, target, events)
        return
    sys.exit(send(found, kind, rest, wanted, once=once))


def parse_target(target: str) -> tuple[str, str]:
    kind, _, rest = target.partition(":")
    if kind not in TARGETS:
        raise UsageError(f"there is no target '{safe_text(kind, 40)}'", hint=f"one of {', '.join(TARGETS)}")
    if rest.startswith("env:"):
        name = rest.removeprefix("env:")
        rest = os.environ.get(name, "")
        if not rest:
            raise UsageError(f"the environment variable {safe_text(name, 60)} is not set", hint=f"export {name}=...")
    if not rest and kind in ("textfile", "webhook", "ntfy", "slack"):
        needed, word = {"textfile": ("a path", "PATH"), "ntfy": ("a topic", "TOPIC")}.get(kind, ("an address", "URL"))
        raise UsageError(f"{kind} needs {needed}", hint=f"--to {kind}:{word}")
    return kind, rest


def parse_events(text: str | None) -> frozenset[str]:
    words = frozenset(word.strip() for word in text.split(",") if word.strip()) if text else frozenset(EVENTS)
    if unknown := sorted(words - set(EVENTS)):
        raise UsageError(f"there is no message '{safe_text(unknown[0], 40)}'", hint=f"one of {', '.join(EVENTS)}")
    return words


def make_sink(run: RunDir, kind: str, rest: str, events: frozenset[str]) -> Sink:
    if kind in ("webhook", "ntfy", "slack"):
        from jackline.exporters.messages import make_messenger

        return make_messenger(kind, rest, events)
    from jackline.exporters.trackers import Mlflow, Trackio, Wandb

    if kind == "wandb":
        return Wandb(rest or os.environ.get("WANDB_PROJECT") or PROJECT, run.path / "exports")
    if kind == "trackio":
        return Trackio(rest or PROJECT)
    uri = rest if "://" in rest else None
    return Mlflow(uri, (rest if not uri else "") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)


def send(run: RunDir, kind: str, rest: str, events: frozenset[str], *, once: bool) -> int:
    reader = Reader(run, export_name(kind, rest), kind)
    sink = make_sink(run, kind, rest, events)
    if not reader.try_lock():
        raise UsageError(
            f"run '{run.name}' is already sent to this {kind} by another process",
            hint=f"it ends with the run; how far it is: {reader.path}",
        )
    _say(f"sending run '{run.name}' to {kind}; the run does not depend on this process")
    try:
        count = Sending(reader, sink, _say, once=once).work()
    except KeyboardInterrupt:
        _say("ended; the same command continues from here")
        return EXIT_FAILED
    finally:
        reader.close()
    record = reader.record
    _say(f"sent {count:,}; in all {record.num_points:,} reports of metrics and {record.num_messages:,} messages")
    return EXIT_DONE


def _detach(run: RunDir, target: str, events: str | None) -> None:
    kind, rest = parse_target(target)
    make_sink(run, kind, rest, parse_events(events))  # a mistake is reported here, not in a log
    name = export_name(kind, rest)
    log = run.path / "exports" / f"{name}.log"
    folder_inside(log.parent)
    words = [sys.executable, "-m", "jackline", "send", str(run.path), "--to", f"{kind}:env:JACKLINE_SEND_TO"]
    if not rest:
        words[-1] = kind
    words += ["--events", events] if events else []
    with open(open_own(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as output:
        process = subprocess.Popen(
            words,
            # Not on its command line, which every user of the machine may read.
            env={**os.environ, "JACKLINE_SEND_TO": rest},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    _say(f"sending run '{run.name}' to {kind} in the background (pid {process.pid}); its words are in {log}")


def _show_metrics(kind: str, rest: str, run: str | None, runs_dir: str | None, once: bool) -> int:
    from jackline.exporters.openmetrics import LOOPBACK, MetricsServer, to_text

    def chosen() -> Sequence[RunDir]:
        return [find(run, runs_dir)] if run else list_runs(runs_folder(runs_dir))

    if once and kind == "prometheus":
        click.echo(to_text(chosen(), time.time()), nl=False)
        return EXIT_DONE
    if kind == "textfile":
        return _write_file(Path(rest).expanduser(), chosen, once=once)
    host, _, number = rest.rpartition(":")
    host = host or HOST
    if number and not number.isdigit():
        raise UsageError(f"'{safe_text(number, 40)}' is not a port", hint=f"--to prometheus:{PORT}")
    port = int(number) if number else PORT
    try:
        server = MetricsServer(host, port, chosen)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}", hint="--to prometheus:PORT") from None
    who = "everybody on" if host in LOOPBACK else "everybody who reaches"
    _say(f"{who} this machine can read the names and numbers of these runs")
    _say(f"http://{host}:{server.port}/metrics (Ctrl-C ends it)")
    try:
        server.serve()
    except KeyboardInterrupt:
        return EXIT_DONE
    return EXIT_DONE


def _write_file(path: Path, chosen: Callable[[], Sequence[RunDir]], *, once: bool) -> int:
    from jackline.exporters.openmetrics import to_text

    _say(f"writing {path}")
    while True:
        runs = chosen()
        is_live = any(read_status(found).state in LIVE for found in runs)
        try:
            write_whole(path, to_text(runs, time.time()).encode())
        except OSError as error:
            raise JacklineError(f"cannot write {path}: {error.strerror}", hint="name a file in a folder") from None
        if once or not is_live:
            return EXIT_DONE
        time.sleep(POLL_S)


def _say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)

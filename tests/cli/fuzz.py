"""Damaged and forged run folders, read by every command: no traceback, no hang, bounded memory, nobody else hidden.

A case is a number: the same number makes the same damage. Commands run inside this process, because 10,000 cases
would otherwise take a day; `--processes N` runs every Nth case also as real processes. Run by `scripts/torture fuzz`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jackline.exporters.reader import EVENTS, About, export_name
from jackline.exporters.sending import Sink
from jackline.rundir.process_id import boot_id, host_name

GOLDEN = Path(__file__).parents[1] / "golden"
HEALTHY = "healthy"
VICTIM = "victim"
HANGS_S = 120
WATCHED_S = 60.0
MAX_MEMORY_BYTES = 300 << 20
PER_PROCESS = 1000  # this process grows with the commands it runs: 300 MB after 180,000; a real one runs one
MAX_TOLD, TOLD_EVERY = 40, 500
SENT_TO = "webhook:http://127.0.0.1:9/"
COMMANDS = (
    ["status", VICTIM],
    ["status", VICTIM, "--json"],
    ["why", VICTIM],
    ["why", VICTIM, "--json"],
    ["why", VICTIM, "--attempt", "1"],
    ["runs"],
    ["runs", "--json"],
    ["runs", "--logs"],
    ["logs", VICTIM],
    ["logs", VICTIM, "--json", "--tail", "5"],
    ["logs", VICTIM, "--raw"],
    ["checkpoints", "list", VICTIM],
    ["checkpoints", "show", VICTIM],
    ["checkpoints", "verify", VICTIM],
    ["checkpoints", "export", VICTIM, "--out", "exported"],
    ["checkpoints", "prune", VICTIM, "--keep", "1", "--dry-run"],
    ["events", VICTIM],
    ["events", VICTIM, "--json"],
    ["wait", VICTIM, "--timeout", "0s"],
    ["goodput", VICTIM],
    ["diff", VICTIM, HEALTHY],
    ["diff", HEALTHY, VICTIM, "--json"],
    ["report", VICTIM, "--out", "-"],
    ["report", VICTIM, "--out", "-", "--md"],
    ["plot", VICTIM],
    ["plot", VICTIM, "--json"],
    ["plot", VICTIM, HEALTHY, "--list"],
    ["goodput", VICTIM, "--json"],
    ["events", VICTIM, "--since", "start"],
    ["why", VICTIM, "--evidence", "--all"],
    ["why", VICTIM, "--save-case", "case.json"],
    ["logs", VICTIM, "--rank", "1"],
    ["checkpoints", "list", VICTIM, "--json"],
    ["checkpoints", "show", VICTIM, "--tensors", "--json"],
    ["export", VICTIM, "--to", "safetensors", "--out", "exported"],
    ["rescue", VICTIM],
    ["rescue", VICTIM, "--json"],
    ["rescue", VICTIM, "--load"],
    ["send", VICTIM, "--to", "prometheus", "--once"],
    ["send", "--to", "textfile:metrics.prom", "--once"],
    ["fork", VICTIM, "lr=1"],
    ["runs", "prune", "--older", "1s", "--dry-run"],
    ["watch", VICTIM],
    ["resume", VICTIM],
    ["resume", VICTIM, "lr=1"],
    ["status"],
)
# They import torch, so only real processes run them: this one's memory is measured.
OF_MODELS = (
    ["sample", VICTIM, "def ", "--tokens", "3"],
    ["export", VICTIM, "--out", "exported-hf"],
    ["eval", VICTIM],
    ["predict", VICTIM, "train.py"],
)
# Commands that read no folder of a run by its name, with the reason. A test holds that every other one is tried.
NOT_READERS = {
    "train": "resolves a recipe first, which takes seconds; the run is read as by `run`",
    "sweep": "the same; its table is a reader of its own",
    "demo": "makes the run it shows",
    "mcp": "asked through its functions",
    "dash": "asked through its functions",
    "init": "writes a file of ours",
    "launch": "writes a file from its arguments",
    "doctor": "reads no run",
    "plan": "reads no run",
    "data": "reads no run",
}
# They act, so only the harness may run them: it holds what would start a process.
ACTS = (
    ["stop", VICTIM],
    ["validate", VICTIM],
    ["resume", VICTIM, "--step", "3", "--here", "--trust"],
    ["resume", VICTIM, "--here", "--trust"],
    ["resume", VICTIM, "--skip-batches", "3:4", "--here", "--trust"],
    ["send", VICTIM, "--to", SENT_TO, "--once"],
    ["run", "--name", VICTIM, "--", sys.executable, "train.py"],
    ["runs", "rm", VICTIM, "--yes", "--force"],  # the last: nothing is left to be read
)
COLORED = ["watch", VICTIM]
COLORS = re.compile(r"\x1b\[(?:0|1|[349][0-7])m")
AS_ONES_OWN = ["watch", VICTIM, "--trust"]  # shows what the program wrote, escapes and all
TEXTS = (
    "",
    "x" * 100_000,
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1b[2J\x1b[H",
    "\x9b31m",
    "\u202egnp.exe",
    "half \ud83d",
    "two\nlines",
    "\x00",
    "../../../etc/passwd",
    "/dev/zero",
    "sftp://me:secret-word@host/x",
    "%s{}",
    "٣",
    "-1",
    "NaN",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1e308,
    -1e308,
    1.5,
    float("nan"),
    float("inf"),
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    [None] * 1000,
    {"pid": 1, "start_ticks": 0, "host": "x", "boot_id": "y"},
)
# Nine lines of YAML that stand for 9^10 words.
LAUGHS = b"a: &a [x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b", ".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
)
WHOLE = (
    b"",
    b"[1]",
    b"null",
    b"NaN",
    b"\x00" * 4096,
    b"\xff\xfe\x00",
    b"{",
    b'{"a":' * 100_000,
    b"[" * 2_000_000,
    b"[" + b"{}," * 1_300_000 + b"{}]",
    b"{}\n" * 300_000,
    b"9" * 5000,
    b'"' + b"x" * 5_000_000 + b'"',
    b"\n" * 1_000_000,
    LAUGHS,
)


def make_base(folder: Path) -> list[Path]:
    """The whole runs that are damaged: the golden ones, and one that has every file a run can have."""
    bases = [path for path in sorted(GOLDEN.iterdir()) if path.name.startswith("format")]
    rich = folder / "rich"
    shutil.copytree(GOLDEN / "format1-killed-oom", rich)
    for place in ("checkpoints", "rescue"):
        shutil.copytree(GOLDEN / "checkpoint-1", rich / place)
    name = next((rich / "checkpoints").iterdir()).name
    now_s = time.time()
    process = {"pid": 4_000_000, "start_ticks": 5, "host": host_name(), "boot_id": boot_id()}
    upload = {"state": "confirmed", "saved_at_s": now_s, "confirmed_at_s": now_s}
    files: dict[str, Any] = {
        "session-0.json": {
            "at_s": now_s,
            "process": process,
            "attempt": 1,
            "phase": "train",
            "done": 5,
            "total": 10,
            "unit": "steps",
            "step": 5,
            "metrics": {"loss": 1.0},
            "last_checkpoint": {"step": 3, "at_s": now_s, "path": name},
            "memory": {"last_oom": {"step": 3, "micro_batch": 4, "parts": {"weights": 100.0}}, "gpu": {}},
            "loss_bounds": {"process_s": 1.0, "machine_s": None, "text": "x"},
            "place": {"epoch": 1, "epochs": 2, "batch": 3, "num_batches": 9},
        },
        "mirror.json": {"place": "/mirror", "checkpoints": {name: upload}, "trouble": {"why": "no", "since_s": 1}},
        "checkpoints/mirror.json": {"place": "/mirror", "checkpoints": {name: upload}},
        "checkpoints/status.json": {"checkpoints": {name: {"acknowledged_at_s": now_s, "read_back_at_s": now_s}}},
        "checkpoints/verified.json": {"checkpoints": {name: {"at_s": now_s}}},
        "checkpoints/writer.lock": {"writer": process, "trainer": process, "phase": "idle"},
        "memory.json": {"predicted_bytes": 5, "measured_bytes": 6},
        "foreign.json": {"known": [{"path": "a.pt", "fingerprint": {"inode": 1, "mtime_ns": 2, "size_bytes": 3}}]},
        "stop-request.json": {"at_s": now_s, "by": "jackline stop", "asker": process},
        "attempts/001/intent.json": {"restart": True, "why": "memory", "settings": {"num_workers": 2}},
        "attempts/001/rescue-4000000.json": rescue_of(name, now_s, folder),
        "attempts/001/surroundings.json": {"at_s": now_s, "packages": {"torch": "2.9"}, "folders": ["/x"], "git": {}},
        "attempts/001/case.json": {"samples": [{"at_s": now_s}], "verdict": {"kind": "STUCK"}},
        "attempts/001/ranks/rank-1.json": {"rank": 1, "world_size": 2, "local_rank": 1, "pid": 4_000_001},
        "skipped-batches.json": {"ranges": [{"first": 3, "end": 4, "at_s": now_s, "step": 3}]},
        f"exports/{export_name(*SENT_TO.split(':', 1))}.json": {
            "kind": "webhook",
            "offsets": {"metrics-0.jsonl": 5},
            "marks": {"loss": 2.0},
            "delivered": ["0123456789abcdef"],
        },
    }
    run_file = json.loads((rich / "run.json").read_text())
    here = {"argv": [sys.executable, "train.py"], "cwd": str(folder)}
    options = {**run_file["options"], "mirror": str(folder / "far"), "when_done": "echo done", "time_limit_s": 60.0}
    files["run.json"] = {**run_file, **here, "settings": here, "options": options, "host": host_name()}
    (folder / "train.py").write_text("print('training')\n")
    for place, value in files.items():
        (rich / place).parent.mkdir(parents=True, exist_ok=True)
        (rich / place).write_text(json.dumps(value))
    lines = {
        "events-0.jsonl": {"at_s": now_s, "event": "checkpoint_committed", "step": 3, "text": "saved"},
        "metrics-0.jsonl": {"at_s": now_s, "step": 3, "loss": 1.0},
        "metrics-printed.jsonl": {"at_s": now_s, "step": 3, "acc": 0.5, "is_guessed": True},
        "timeline.jsonl": {"at_s": now_s, "attempt": 1, "verdict": "PROGRESS", "phase": "train", "spent_s": {}},
    }
    for place, value in lines.items():
        (rich / place).write_text((json.dumps(value) + "\n") * 20)
    for place, text in {
        "checkpoints/latest": name,
        "checkpoints/best": name,
        "attempts/001/incident-1.txt": "STUCK at train.py:3\n",
        "attempts/001/stacks/fh.4000000": 'Fatal Python error: Segmentation fault\n\n  File "/a.py", line 3 in f\n',
        "attempts/001/raw.out": "step 1\rstep 2\nTraceback (most recent call last):\nValueError: no\n",
        "attempts/001/ranks/rank-1.out": "rank 1 says\nValueError: no\n",
        "attempts/001/code.diff": "--- a/train.py\n+++ b/train.py\n",
        "config.yaml": "recipe: demo\nmax_steps: 10\n",
        "tb/events.out.tfevents.1": "x",
        "seen-0.bin": "\0" * 80,
    }.items():
        (rich / place).parent.mkdir(parents=True, exist_ok=True)
        (rich / place).write_text(text)
    return [*bases, rich, rich, rich]


def rescue_of(name: str, now_s: float, folder: Path) -> dict[str, Any]:
    """What a process writes about its rescue, of the script beside the run."""
    script = str(folder / "train.py")
    parts = [
        {"key": key, "kind": kind, "class": "Net", "expression": key, "file": script, "function": "<module>"}
        for key, kind in (("model", "module"), ("optim", "optimizer"), ("z", "tensors"))
    ]
    return {
        "id": "1",
        "pid": 4_000_000,
        "cause": "stop",
        "outcome": "saved",
        "name": name,
        "path": f"rescue/{name}",
        "step": 3,
        "moment": "after step 3",
        "at_s": now_s,
        "size_bytes": 5,
        "file": script,
        "function": "<module>",
        "line": 1,
        "parts": parts,
        "missing": ["the position in the data"],
        "values": {"epoch": 1},
    }


def damage(run: Path, chance: random.Random) -> str:
    """Change one to three things; returns what was done."""
    return "; ".join(chance.choice(DAMAGES)(run, chance) for _ in range(chance.choice((1, 1, 1, 2, 3))))


def _file(run: Path, chance: random.Random) -> Path:
    found = _files(run, "*")
    return chance.choice(found) if found else run / "run.json"


def _files(run: Path, pattern: str) -> list[Path]:
    found = (path for path in run.rglob(pattern) if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if path.stat().st_size < 1 << 20)  # what is measured is not this harness


def flip(run: Path, chance: random.Random) -> str:
    path = _file(run, chance)
    data = bytearray(path.read_bytes() or b"x")
    for _ in range(chance.choice((1, 1, 3, 30))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(data)
    return f"flip {path.name}"


def cut(run: Path, chance: random.Random) -> str:
    path = _file(run, chance)
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])
    return f"cut {path.name}"


def repeat(run: Path, chance: random.Random) -> str:
    path = _file(run, chance)
    data = path.read_bytes()
    start = chance.randrange(len(data) + 1)
    path.write_bytes(data[:start] + data[start : start + 200] * 5 + data[start:])
    return f"repeat in {path.name}"


def replace_whole(run: Path, chance: random.Random) -> str:
    path = _file(run, chance)
    path.write_bytes(chance.choice(WHOLE))
    return f"replace {path.name}"


def delete(run: Path, chance: random.Random) -> str:
    path = _file(run, chance)
    path.unlink(missing_ok=True)
    return f"delete {path.name}"


def put_something_else(run: Path, chance: random.Random) -> str:
    """A FIFO, a device, a folder, a socket or a huge sparse file in place of a file."""
    path = _file(run, chance)
    path.unlink(missing_ok=True)
    kind = chance.choice(("fifo", "zero", "folder", "loop", "sparse", "socket", "elsewhere"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(10 << 30)
    elif kind == "socket":
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.symlink_to({"zero": "/dev/zero", "loop": path.name, "elsewhere": "/etc/passwd"}[kind])
    return f"{kind} for {path.name}"


def add(run: Path, chance: random.Random) -> str:
    name = chance.choice(
        ("attempts/٣", "attempts/9999999999", "attempts/2", "attempts/002", "attempts/x", "attempts/004/stacks")
        + ("attempts/001/incident-x.txt", "attempts/001/incident-٣.txt", "session-٣.json", "session-7.json")
        + ("checkpoints/step-00000009", "checkpoints/damaged-x", "checkpoints/step-99999999999999999999", "tb")
        + ("checkpoints/rewind-00000002-r1.json", "attempts/001/stacks/fh.7", "\x1b[2J", "events-١.jsonl")
    )
    path = run / name
    with contextlib.suppress(OSError):
        if chance.random() < 0.5:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chance.choice(WHOLE[:6]))
    return f"add {name!r}"


def change_value(run: Path, chance: random.Random) -> str:
    """Another value somewhere in a JSON file, or in a line of one."""
    texts = _files(run, "*.json*")
    if not texts:
        return "nothing"
    path = chance.choice(texts)
    lines = (
        path.read_text("utf-8", "replace").split("\n")
        if path.suffix == ".jsonl"
        else [path.read_text("utf-8", "replace")]
    )
    index = chance.randrange(len(lines))
    try:
        value = json.loads(lines[index])
    except (ValueError, RecursionError):
        return f"{path.name} is no JSON"
    new = chance.choice(VALUES) if chance.random() < 0.6 else chance.choice(TEXTS)
    where = list(_places(value))
    if not where:
        value = new
    else:
        holder, key = chance.choice(where)
        holder[key] = new
    lines[index] = json.dumps(value)
    path.write_text("\n".join(lines))
    return f"value in {path.name} -> {str(new)[:30]!r}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(entry)


DAMAGES: tuple[Callable[[Path, random.Random], str], ...] = (
    flip,
    cut,
    repeat,
    replace_whole,
    delete,
    put_something_else,
    put_something_else,
    add,
    *[change_value] * 8,
)


class Hangs(Exception):
    """A command took longer than HANGS_S."""


class Held(SystemExit):
    """A command got as far as starting a process."""


def hold(*words: Any, **named: Any) -> Any:
    raise Held(0)


class Clock:
    """`time` for a command that polls: sleeping costs nothing. A view that has nothing to wait for ends by itself."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self.slept_s

    def sleep(self, duration_s: float) -> None:
        self.slept_s += duration_s
        if self.slept_s > WATCHED_S:
            raise Held(0)


class Accepts(Sink):
    """The other side of `jackline send`, without a network."""

    takes_points = True
    events = frozenset(EVENTS)

    def open(self, about: About) -> dict[str, float]:
        json.dumps([about.name, about.command, dict(about.facts)]).encode()
        return {}

    def close(self, state: str) -> None:
        assert state


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    """In this block no supervisor is started: everything before that has happened as in real life."""
    from jackline.cli.commands import resume
    from jackline.cli.programs import send
    from jackline.cli.view import showing, viewer
    from jackline.rundir import create
    from jackline.supervisor import start

    clock = Clock()
    places: list[tuple[Any, str, Any]] = [
        (showing, "start_supervisor", hold),
        (showing, "take_over_unless_watched", hold),
        (start, "take_over_unless_watched", hold),
        (viewer, "time", clock),
        (resume, "time", clock),
        (create, "time", clock),  # a lock that a command before this one holds until its process ends
        (send, "make_sink", lambda *words: Accepts()),
    ]
    former = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, other in places:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module, name, own in former:
            setattr(module, name, own)


@contextlib.contextmanager
def captured(stream: io.BytesIO) -> Iterator[None]:
    """What a view writes to the descriptors 1 and 2, past Python's own streams."""
    with tempfile.TemporaryFile() as file:
        former = [(fd, os.dup(fd)) for fd in (1, 2)]
        try:
            for fd, _ in former:
                os.dup2(file.fileno(), fd)
            yield
        finally:
            for fd, own in former:
                os.dup2(own, fd)
                os.close(own)
            file.seek(0)
            stream.write(file.read())


def ask_page(runs: Path) -> list[Any]:
    """Everything that the page of `jackline dash` asks for, of both runs."""
    from jackline.cli.pages.told import RunTeller
    from jackline.dashboard.server import PARTS, to_body
    from jackline.dashboard.views import Site

    site = Site(runs, RunTeller())
    found: list[Any] = [site.runs_json(time.time())]
    for row in found[0]["runs"]:
        kept = site.find(row["key"])
        assert kept is not None
        found += [
            answer(site, kept, asked) for answer in PARTS.values() for asked in ({}, {"find": "e", "since": "3"})
        ]
    return [json.loads(to_body(answer)) for answer in found]


def ask_tools(runs: Path) -> list[Any]:
    """What the tools of `jackline mcp` answer; `why` is the command."""
    from jackline.cli.programs.conditions import parse_conditions
    from jackline.cli.programs.server import list_json, status_json
    from jackline.cli.programs.wait import wait_for
    from jackline.errors import JacklineError
    from jackline.rundir.find import find_run

    found: list[Any] = [list_json(runs, 10)]
    for answer in (
        lambda: status_json(find_run(VICTIM, runs)),
        lambda: status_json(find_run(None, runs)),
        lambda: wait_for(find_run(VICTIM, runs), parse_conditions(["ended,stuck,nan,step=3,loss<2.5"]), 0.0)[0],
    ):
        with contextlib.suppress(JacklineError):  # an error for people, which a tool passes on in words
            found.append(answer())
    return found


def ask_card(runs: Path) -> list[Any]:
    """The card under a notebook's cell."""
    from jackline.cli.view.run_view import read_view
    from jackline.notebook.card import card_html, card_text, read_charts
    from jackline.rundir.layout import RunDir

    run = RunDir(runs / VICTIM)
    view = read_view(run, now_s=time.time())
    return [card_text(view), card_html(view, read_charts(run))]


def ask_sweep(runs: Path) -> list[Any]:
    """The table of a sweep, one of whose runs is the damaged one."""
    from jackline.cli.models.sweep import Combination, state_of, table
    from jackline.rundir.layout import RunDir

    found = [RunDir(runs / name) for name in (HEALTHY, VICTIM)]
    made = [Combination((), ("1",), run, {"metric": "loss"}, False, state_of(run, {"lr": 1})) for run in found]
    alike = [Combination((), ("1",), run, {"metric": "loss"}, True, "dead") for run in found]
    return [table(["lr"], made), table(["lr"], alike)]


SERVED: dict[str, Callable[[Path], list[Any]]] = {
    "dash": ask_page,
    "mcp": ask_tools,
    "card": ask_card,
    "sweep": ask_sweep,
}
LISTS = ("runs", "dash", "mcp")


def ask_inside(reader: Callable[[Path], list[Any]], runs: Path) -> tuple[str, str]:
    """The answers as a client would receive them, and the traceback if there is one. Raises Hangs."""
    try:
        answers = [json.dumps(answer, ensure_ascii=False, allow_nan=False) for answer in reader(runs)]
        text = "\n".join(answers).encode().decode()
    except Hangs:
        raise
    except BaseException:
        return "", traceback.format_exc()
    return text, ""


def run_inside(words: list[str]) -> tuple[str, str]:
    """What a command printed, and the traceback if it has one. Raises Hangs."""
    from jackline.cli.main import main

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    former = sys.argv, sys.stdout, sys.stderr, Path.cwd()
    direct = io.BytesIO()
    streams = out.buffer, err.buffer, direct
    sys.argv, sys.stdout, sys.stderr = ["jackline", *words], out, err
    trouble = ""
    try:
        with nothing_starts(), captured(direct):
            main()
    except SystemExit:
        pass
    except Hangs:
        raise
    except BaseException:
        trouble = traceback.format_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        sys.argv, sys.stdout, sys.stderr = former[:3]
        os.chdir(former[3])
    return "".join(stream.getvalue().decode("utf-8", "replace") for stream in streams), trouble


def forbidden(text: str, *, with_colors: bool = False) -> str:
    """The first character that must never reach a terminal. `with_colors`: plain colours may."""
    for char in COLORS.sub("", text) if with_colors else text:
        if char not in "\n\t\u200c\u200d" and unicodedata.category(char) in ("Cc", "Cf", "Cs"):
            return repr(char)
    return "secret-word" if "secret-word" in text else ""


def try_case(case: int, bases: list[Path], folder: Path, counts: Counter[str]) -> list[str]:
    """Damage one run and read it with all commands; returns what went wrong."""
    chance = random.Random(case)
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    # What an earlier case said `--trust` to must not make this one's run the user's own.
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)
    shutil.copytree(bases[0], runs / HEALTHY)
    shutil.copytree(chance.choice(bases), runs / VICTIM)
    what = damage(runs / VICTIM, chance)
    wrong = []
    readers = [(" ".join(words), partial(run_inside, [*words, "--runs-dir", str(runs)])) for words in COMMANDS]
    readers += [(name, partial(ask_inside, reader, runs)) for name, reader in SERVED.items()]
    readers += [
        (" ".join(words), partial(run_inside, [*words, "--runs-dir", str(runs)])) for words in (*ACTS, AS_ONES_OWN)
    ]
    for name, read in readers:
        counts["commands"] += 1
        signal.alarm(HANGS_S)
        try:
            said, trouble = read()
        except Hangs:
            wrong.append(f"case {case} ({what}): jackline {name} hangs")
            continue
        finally:
            signal.alarm(0)
        if trouble:
            wrong.append(f"case {case} ({what}): jackline {name}\n{trouble}")
        is_filtered = "--raw" not in name and name.split() != AS_ONES_OWN
        is_live = name.split() == COLORED
        # A progress bar of the program is redrawn by its carriage returns.
        shown = said.replace("\r", "") if is_live else said
        if char := forbidden(shown, with_colors=is_live) if is_filtered else "":
            wrong.append(f"case {case} ({what}): jackline {name} printed {char}")
        if name in LISTS and HEALTHY not in said:
            wrong.append(f"case {case} ({what}): `{name}` hides the healthy run:\n{said}")
    return wrong


def as_processes(folder: Path) -> list[str]:
    """The same commands as real processes on the run that was damaged last."""
    wrong = []
    for words in (*COMMANDS, *OF_MODELS):
        command = [sys.executable, "-m", "jackline", *words, "--runs-dir", str(folder / "runs")]
        try:
            done = subprocess.run(command, capture_output=True, timeout=HANGS_S * 6, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            wrong.append(f"{' '.join(words)} hangs as a process")
            continue
        if b"Traceback" in done.stderr and b"jackline/cli/main.py" in done.stderr:
            wrong.append(f"{' '.join(words)}: {done.stderr.decode('utf-8', 'replace')}")
    return wrong


def fuzz(first: int, count: int, folder: Path, *, processes_every: int = 0) -> tuple[list[str], Counter[str]]:
    """Cases `first` to `first + count - 1`. The environment must have a state folder of its own."""

    def on_alarm(number: int, frame: object) -> None:
        raise Hangs

    signal.signal(signal.SIGALRM, on_alarm)
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    bases = make_base(folder)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for case in range(first, first + count):
        found = try_case(case, bases, folder, counts)
        counts["cases"] += 1
        if processes_every and case % processes_every == 0:
            found += as_processes(folder)
            counts["processes"] += len(COMMANDS) + len(OF_MODELS)
        for text in found if len(wrong) < MAX_TOLD else ():
            print(text, flush=True)
        wrong += found
        if case % TOLD_EVERY == TOLD_EVERY - 1:
            print(f"{counts['cases']} mutations, {len(wrong)} wrong", flush=True)
        if peak_bytes() > MAX_MEMORY_BYTES:
            wrong.append(f"case {case}: the process has taken more than 300 MB")
            break
    return wrong, counts


def peak_bytes() -> int:
    """Of this program alone: getrusage also counts the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def in_processes(first: int, end: int, processes_every: int) -> int:
    """All cases, so many in each process; 1 when something was wrong in one of them."""
    codes = []
    for seed in range(first, end, PER_PROCESS):
        words = ["--seed", seed, "--cases", min(PER_PROCESS, end - seed), "--processes", processes_every]
        codes.append(
            subprocess.run([sys.executable, "-m", "tests.cli.fuzz", *map(str, words)], check=False).returncode
        )
    return int(any(codes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=0, help="every Nth case also as real processes")
    given = parser.parse_args()
    if given.cases > PER_PROCESS:
        sys.exit(in_processes(given.seed, given.seed + given.cases, given.processes))
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_STATE_HOME"] = f"{made}/state"
        os.chdir(made)
        wrong, counts = fuzz(given.seed, given.cases, Path(made), processes_every=given.processes)
    peak = peak_bytes() >> 20
    print(
        f"{counts['cases']} mutations, {counts['commands']} commands, {counts['processes']} as processes: "
        f"{len(wrong)} wrong; peak memory {peak} MB"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

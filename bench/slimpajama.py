"""How soon `jackline train slimpajama` speaks and how long it is ever silent, through a pipe, on a slow stream.

    python bench/slimpajama.py                       one document a second, 3 chunks of 1,024 tokens: about a minute
    python bench/slimpajama.py --every 0.2 --chunks 10 --json out.json

A local server gives one document (about 100 tokens) every `--every` seconds, each as it is, without end and without
telling its length; it also writes down when. Measured by whoever reads the pipe: the first line after the command was
started, the longest silence from then to the end, the longest inside the trainer's own phases, and how much later
than the document itself its sample is counted (with --verbose every sample has a line).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).parents[1]
SENTENCE = "the of and to in a is that it was for on are as with his they at be this from or by one had not"
OWN = re.compile(r"\[(data|model|plan|rehearsal|train|eval|sentinel|end)\]")
SAMPLE = re.compile(r"\[data\] sample (\d+) of ")


class SlowServer:
    """`sent[n]` is when document n of the last stream went out, by time.monotonic()."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.sent: dict[int, float] = {}
        self.is_over = threading.Event()
        self.url = ""

    def stream(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        sent = self.sent = {}
        for number in itertools.count(1):
            text = " ".join(random.Random(number).choices(SENTENCE.split(), k=100))
            try:
                handler.wfile.write(zstandard.compress(json.dumps({"text": text}).encode() + b"\n"))
                handler.wfile.flush()
            except OSError:
                return
            sent[number] = time.monotonic()
            if self.is_over.wait(self.every_s):
                return


@contextmanager
def serving(every_s: float) -> Iterator[SlowServer]:
    made = SlowServer(every_s)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.stream(self)

        def log_message(self, *args: object) -> None:
            """The bench's output stays the bench's."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}/chunk1/example_train_{{0..59165}}.jsonl.zst"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def listen(url: str, chunks: int, words: list[str]) -> tuple[list[tuple[float, str]], float, float, int]:
    """(when, line) of everything the command prints, when it was started, how long it took, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "JACKLINE_RUNS": str(work / "runs"),
            "XDG_STATE_HOME": str(work / "state"),
        }
        argv = [sys.executable, "-m", "jackline", "train", "slimpajama", "--test", f"--max-chunks={chunks}"]
        argv += [f"--data={url}", "--verbose", *words]
        began_s = time.monotonic()
        process = subprocess.Popen(argv, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        heard: list[tuple[float, str]] = []
        while data := os.read(process.stdout.fileno(), 65536):
            now_s = time.monotonic()
            heard += [(now_s, line) for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        code = process.wait()
        return heard, began_s, time.monotonic() - began_s, code


def measure(every_s: float, chunks: int, words: list[str]) -> dict[str, Any]:
    with serving(every_s) as server:
        heard, began_s, total_s, code = listen(server.url, chunks, words)
        sent = server.sent
    if code:
        sys.exit("\n".join(line for _, line in heard))
    gaps = [(b[0] - a[0], a[1], b[1]) for a, b in itertools.pairwise([(began_s, "start"), *heard])]
    own = [gap for gap in gaps if OWN.match(gap[1]) and OWN.match(gap[2])]
    late = [at_s - sent[int(found[1])] for at_s, line in heard if (found := SAMPLE.match(line))]
    first_own = next(at_s for at_s, line in heard if line.startswith("[start]")) - began_s
    rows = [
        ("first line after start", 2.0, heard[0][0] - began_s),
        ("first line of the trainer", 2.0, first_own),
        ("longest silence in our phases", 2.0, max(own)[0]),
        ("longest silence anywhere", 10.0, max(gaps)[0]),
    ]
    print(f"{'what':<34}{'target s':>10}{'measured s':>12}{'ratio':>8}")
    for name, target, value in rows:
        print(f"{name:<34}{target:>10.2f}{value:>12.2f}{value / target:>8.2f}")
    print(
        f"from a document's going out to its sample's line: median {statistics.median(late):.2f} s, longest "
        f"{max(late):.2f} s (a step was under way) of {len(late)}"
    )
    print(f"longest in our phases: after  {max(own)[1][:100]}\n{'':>23}before {max(own)[2][:100]}")
    print(f"{total_s:.1f} s in all, {len(heard)} lines, one document every {every_s:g} s")
    return {"rows": rows, "late_s": late, "total_s": total_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two documents")
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("words", nargs="*", help="further settings, key=value")
    given = parser.parse_args()
    found = measure(given.every, given.chunks, given.words)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

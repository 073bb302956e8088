"""A builder that is stopped, killed or robbed of its folder; readers that die: said, survived, nothing changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.data.build.builder import cache_folder, run_builder
from jackline.data.build.supply import BackgroundSupply, BuilderWatch, open_cache, open_data
from jackline.data.loader.loader import Batch, Loader
from jackline.data.progress import Progress, silent
from jackline.data.spec import CacheSettings
from jackline.errors import JacklineError
from jackline.rundir.atomic import write_json
from jackline.rundir.process_id import identify
from tests.data.corpora import make_texts, spec_of, write_jsonl
from tests.data.test_supply import SETTINGS, corpus, same, wait_until, whole_cache_batches
from tests.deadline import HANGS_S


def test_a_stopped_tokeniser_is_named_and_does_not_hold_the_end_up(tmp_path: Path) -> None:
    reports: list[Progress] = []
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(4000)), era_tokens=1 << 22)
    data = open_data(spec, CacheSettings(root=tmp_path / "cache"), reports.append)
    loader = Loader(data, SETTINGS)
    assert isinstance(data.supply, BackgroundSupply)
    process = data.supply._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    reading = threading.Thread(target=lambda: list(quietly(loader)), daemon=True)
    reading.start()
    words = f"is stopped by a signal: `kill -CONT {process.pid}` lets it continue"
    wait_until(lambda: any(report.detail.endswith(words) for report in reports))
    loader.close()
    reading.join(timeout=HANGS_S)
    assert not reading.is_alive()
    assert process.poll() is not None


def quietly(loader: Loader) -> Iterator[Batch]:
    with contextlib.suppress(JacklineError):
        yield from loader


def test_a_tokeniser_without_a_sign_of_life_is_said(tmp_path: Path) -> None:
    folder = cache_folder(corpus(tmp_path), CacheSettings(root=tmp_path / "cache"))
    me = identify(os.getpid())
    assert me is not None
    progress = Progress("tokenise", 5, 10, "B", 1.0, "a.jsonl").to_json()
    write_json(folder / "builder.json", {"state": "working", "process": me.to_json(), "progress": progress})
    now_s = 0.0
    watch = BuilderWatch(folder, clock=lambda: now_s)
    found = watch.describe("era 3 of the data")
    assert (found.phase, found.detail) == ("wait", "era 3 of the data: tokenise a.jsonl")
    now_s = 3600.0
    late = watch.describe("era 3 of the data")
    assert late.detail == f"era 3 of the data: no sign of life from the tokeniser (process {me.pid}) for 1 h"
    assert late.rate_per_s is None
    # Written again, by a clock that was set back to 1970: what counts is that it changed.
    os.utime(folder / "builder.json", (1, 1))
    assert watch.describe("era 3 of the data").detail == "era 3 of the data: tokenise a.jsonl"


def test_a_cache_that_is_deleted_while_it_is_read_is_said(tmp_path: Path) -> None:
    data = open_data(corpus(tmp_path), CacheSettings(root=tmp_path / "cache", eras_ahead=1))
    with Loader(data, SETTINGS) as loader:
        next(loader)
        loader.cache.folder.rename(tmp_path / "away")
        with pytest.raises(JacklineError) as caught:
            list(loader)
    assert str(caught.value) == (
        f"error: the token cache {loader.cache.folder} is gone\n"
        "hint: somebody deleted it or its disk is away; run the same command again and it is built anew"
    )


def test_a_builder_whose_cache_is_deleted_stops_with_a_sentence(tmp_path: Path) -> None:
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(4000)), era_tokens=1 << 22)
    settings = CacheSettings(root=tmp_path / "cache")
    folder = cache_folder(spec, settings)

    def delete() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return False

    with pytest.raises(JacklineError) as caught:
        run_builder(folder, settings, silent, for_readers=False, should_stop=delete)
    assert caught.value.message == f"the token cache {folder} is gone"


def test_a_finished_cache_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    spec = corpus(tmp_path, 300)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    folder = cache_folder(spec, CacheSettings(root=tmp_path / "ready"))
    with Loader(open_cache(folder, CacheSettings(root=tmp_path)), SETTINGS) as loader:
        for _ in range(60):
            next(loader)
        state = loader.state()
    assert state["era"] > 1
    disk = tmp_path / "read-only"
    disk.mkdir()
    made = subprocess.run(["mount", "--bind", "-o", "ro", folder, disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a folder read-only here: {made.stderr.strip()}")
    try:
        with pytest.raises(OSError, match="Read-only file system"):
            (disk / "x").touch()
        data = open_cache(disk, CacheSettings(root=tmp_path), state=state)
        with Loader(data, SETTINGS, state) as loader:
            assert same(list(loader), ready[60:])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_cache_opened_by_its_folder_finds_its_source_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "here" / "a.jsonl", make_texts(600))
    monkeypatch.chdir(tmp_path / "here")
    spec = spec_of("a.jsonl", first_era_tokens=1 << 13, era_tokens=1 << 15)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    settings = CacheSettings(root=tmp_path / "cache", max_cache_bytes=3 << 16)
    folder = cache_folder(spec, settings)
    run_builder(folder, settings, silent, for_readers=False)
    monkeypatch.chdir(tmp_path)
    with Loader(open_cache(folder, settings), SETTINGS) as loader:
        assert same(list(loader), ready)


# A run that writes down every batch before it asks for the next, and resumes from the last line after its own death.
READER = """
import hashlib, json, sys
from pathlib import Path
from jackline.data.loader.loader import Loader, LoaderSettings
from jackline.data.spec import CacheSettings, DataSpec
from jackline.data.build.supply import open_data

asked = json.loads(sys.argv[1])
log = Path(sys.argv[2])
lines = log.read_text().splitlines() if log.exists() else []
state = json.loads(lines[-1])["state"] if lines else None
data = open_data(DataSpec.from_json(asked["spec"]), CacheSettings.from_json(asked["settings"]), state=state)
settings = LoaderSettings(seq_len=64, batch_size=8, seed=3, epochs=2)
with Loader(data, settings, state) as loader, open(log, "a") as file:
    for batch in loader:
        line = {"hash": hashlib.sha256(batch.tokens.tobytes()).hexdigest(), "state": loader.state()}
        file.write(json.dumps(line) + "\\n")
        file.flush()
        process = loader._supply._process
        (log.parent / "builder.pid").write_text(str(process.pid if process else 0))
"""


def test_reader_and_builder_killed_in_turn_give_the_same_batches(tmp_path: Path) -> None:
    spec = corpus(tmp_path, 500)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    settings = CacheSettings(root=tmp_path / "killed", eras_ahead=2, max_cache_bytes=4 << 16)
    asked = json.dumps({"spec": spec.to_json(), "settings": settings.to_json()})
    log = tmp_path / "batches.jsonl"
    num_lines = num_builders_killed = 0
    for target in (40, 120, len(ready)):
        child = subprocess.Popen([sys.executable, "-c", READER, asked, str(log)])
        is_killed = False
        while child.poll() is None and num_lines < target:
            num_lines = log.read_bytes().count(b"\n") if log.exists() else 0
            is_killed = is_killed or (num_lines > target - 80 and kill_builder(tmp_path / "builder.pid"))
            time.sleep(0.002)
        num_builders_killed += is_killed
        if target < len(ready):
            child.send_signal(signal.SIGKILL)
        child.wait(HANGS_S)
    found = [json.loads(line)["hash"] for line in log.read_text().splitlines()]
    assert num_builders_killed >= 1
    assert found == [hashlib.sha256(batch.tokens.tobytes()).hexdigest() for batch in ready]


def kill_builder(path: Path) -> bool:
    """Kill the builder named there; False when there is none."""
    pid = int(path.read_text() or 0) if path.exists() else 0
    try:
        is_builder = pid > 0 and b"jackline.data" in Path(f"/proc/{pid}/cmdline").read_bytes()
        if is_builder:
            os.kill(pid, signal.SIGKILL)
        return is_builder
    except (FileNotFoundError, ProcessLookupError):
        return False

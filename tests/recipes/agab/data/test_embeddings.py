"""The cache of embeddings: killed anywhere, damaged anywhere, shared by two, out of disk; the bytes stay the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jackline.errors import JacklineError
from jackline.recipes.agab.data import embeddings, features, mirrored
from jackline.recipes.agab.data.mirrored import copy_in, copy_out, files_of
from jackline.recipes.agab.data.prepared import AffinityData, AffinitySettings, cache_keys, prepare_affinity
from jackline.recipes.agab.data.shards import list_shards
from jackline.rundir.lock import RunLock
from tests.deadline import HANGS_S
from tests.faults import Fault, fail_at, kill_at
from tests.recipes.agab.data.encode_program import SHARD_ROWS
from tests.recipes.agab.data.planted import write_planted

ROWS = 450  # five shards of antibodies


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "planted.csv"
    write_planted(path, ROWS, 12, seed=3, noise=0.3)
    return path


@pytest.fixture(scope="module")
def undisturbed(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    cache = tmp_path_factory.mktemp("cache")
    done = run(table, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    found = contents(cache)
    assert sum("/shard-" in name for name in found) == 6
    return found


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SHARD_ROWS", SHARD_ROWS)


def run(table: Path, cache: Path, fault: Fault | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.recipes.agab.data.encode_program", str(table), str(cache)]
    environment = fault.in_child(os.environ) if fault else dict(os.environ)
    return subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=HANGS_S
    )


def contents(cache: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for path in sorted(cache.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def prepare(table: Path, cache: Path, lines: list[str] | None = None) -> AffinityData:
    said = [] if lines is None else lines
    return prepare_affinity(AffinitySettings(str(table), cache_dir=cache), said.append)


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    original: Callable[..., Any] = features.EmbeddedEncoder.encode

    def counted(self: Any, sequences: list[bytes], moved: Callable[[int], None]) -> Any:
        counts.append(len(sequences))
        return original(self, sequences, moved)

    monkeypatch.setattr(features.EmbeddedEncoder, "encode", counted)
    return counts


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("embedding.replace", 1),  # store.json
        ("embedding.write", 4),  # inside a shard
        ("embedding.replace", 4),  # the shard is written and not yet named
        ("embedding.replace", 8),  # the matrix
        ("embedding.replace", 9),  # the matrix is there, what vouches for it is not
    ],
)
def test_a_death_anywhere_leaves_a_cache_that_ends_up_the_same(
    point: str, nth: int, table: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    with kill_at(point, nth=nth) as fault:
        assert run(table, tmp_path, fault).returncode == -9
    before = {path.name for path in tmp_path.rglob("shard-*")}
    prepare(table, tmp_path)
    assert contents(tmp_path) == undisturbed
    assert before <= {path.name for path in tmp_path.rglob("shard-*")}


def test_a_full_disk_is_told_and_nothing_encoded_is_lost(
    table: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    with fail_at("embedding.write", with_errno=errno.ENOSPC, nth=4, goes_on=True) as fault:
        done = run(table, tmp_path, fault)
    assert done.returncode == 1
    told = done.stdout.splitlines()[-2:]
    assert told[0].startswith("error: cannot write the embedding cache: No space left on device (")
    assert told[0].endswith(f" free in {tmp_path}/embeddings/{cache_keys(AffinitySettings(str(table)))[0]})")
    assert told[1] == (
        "hint: free some space or name another place (cache_dir=PATH), then run the same command again: "
        "what is encoded already is kept"
    )
    assert len(list(tmp_path.rglob("shard-*"))) >= 1
    assert not list(tmp_path.rglob(".*"))
    prepare(table, tmp_path)
    assert contents(tmp_path) == undisturbed


def test_a_disk_that_is_too_small_is_told_before_anything_is_encoded(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_statvfs = os.statvfs

    def nearly_full(path: Any) -> Any:
        found = true_statvfs(path)
        return os.statvfs_result((*found[:4], 1, *found[5:10]))

    monkeypatch.setattr(os, "statvfs", nearly_full)
    counts = count_encoded(monkeypatch)
    with pytest.raises(JacklineError, match=r"450 sequences need 1\.8 MiB of disk for their vectors, and"):
        prepare(table, tmp_path)
    assert counts == []


def test_two_processes_at_once_encode_every_sequence_once(
    table: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.recipes.agab.data.encode_program", str(table), str(tmp_path)]
    both = [
        subprocess.Popen(command, cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=HANGS_S)[0].splitlines()[-1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    assert contents(tmp_path) == undisturbed


def test_who_waits_says_for_whom(table: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    key = cache_keys(AffinitySettings(str(table), cache_dir=tmp_path))[0]
    path = tmp_path / "embeddings" / key / "lock"
    lock = RunLock(path)
    assert lock.try_acquire()
    path.write_text(str(os.getpid()))
    command = [sys.executable, "-u", "-m", "tests.recipes.agab.data.encode_program", str(table), str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        wanted = f"waiting for process {os.getpid()}, which writes {key}\n"
        assert next(line for line in process.stdout if line.startswith("waiting")) == wanted
        lock.release()
        assert process.wait(timeout=HANGS_S) == 0
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize("place", ["header", "hashes", "vectors", "cut", "empty"])
def test_a_damaged_shard_is_found_and_encoded_anew(
    place: str, table: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = prepare(table, tmp_path).fingerprint
    key = cache_keys(AffinitySettings(str(table), cache_dir=tmp_path))[0]
    folder = tmp_path / "embeddings" / key
    shard = list_shards(folder)[2]
    damage(shard, place)
    for path in folder.glob("matrix-*"):
        path.unlink()
    counts = count_encoded(monkeypatch)
    lines: list[str] = []
    assert prepare(table, tmp_path, lines).fingerprint == fingerprint
    assert counts == [SHARD_ROWS]
    (warning,) = [line for line in lines if line.startswith("warning: embedded")]
    assert warning.startswith(f"warning: {key}/{shard.name}: ")
    assert warning.endswith("; its sequences are encoded again")
    assert contents(tmp_path) == undisturbed


def damage(path: Path, place: str) -> None:
    data = bytearray(path.read_bytes())
    if place in ("cut", "empty"):
        os.truncate(path, len(data) - 7 if place == "cut" else 0)
        return
    data[{"header": 9, "hashes": 80, "vectors": len(data) - 1000}[place]] ^= 0x10
    path.write_bytes(data)


def test_a_damaged_matrix_is_made_again_from_the_shards(
    table: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(table, tmp_path)
    counts = count_encoded(monkeypatch)
    for matrix in tmp_path.rglob("matrix-*.npy"):
        damage(matrix, "vectors")
    lines: list[str] = []
    prepare(table, tmp_path, lines)
    assert sum(line.endswith("is damaged; it is made again from the shards") for line in lines) >= 2
    assert counts == []
    assert contents(tmp_path) == undisturbed


def test_another_table_encodes_only_what_is_new(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(table, tmp_path / "cache")
    more = tmp_path / "more.csv"
    lines = table.read_text().splitlines()
    new = "EVQLVESGG|DIQMTQ," + lines[1].split(",", 1)[1]
    more.write_text("\n".join([lines[0], new, *lines[:0:-1], *lines[1:]]) + "\n")  # backwards, then forwards again
    counts = count_encoded(monkeypatch)
    second = prepare(more, tmp_path / "cache")
    assert counts == [1]
    assert len(second.antibody) == len(first.antibody) + 1
    assert second.counts["used"] == 2 * ROWS + 1
    vectors = second.antibody[second.antibody_row[1:]]
    assert np.array_equal(vectors[ROWS:], first.antibody[first.antibody_row])
    assert np.array_equal(vectors[:ROWS], first.antibody[first.antibody_row][::-1])
    assert prepare(more, tmp_path / "elsewhere").fingerprint == second.fingerprint


def test_matrices_of_old_tables_are_let_go_and_a_reader_of_one_does_not_notice(table: Path, tmp_path: Path) -> None:
    lines = table.read_text().splitlines()
    kept = [prepare(table, tmp_path / "cache")]
    expected = np.array(kept[0].antibody)
    for count in range(20, 26):
        short = tmp_path / f"{count}.csv"
        short.write_text("\n".join(lines[: count + 1]) + "\n")
        kept.append(prepare(short, tmp_path / "cache"))
    assert len(list((tmp_path / "cache" / "embeddings" / kept[0].cache_keys[0]).glob("matrix-*.npy"))) == 4
    assert np.array_equal(kept[0].antibody, expected)


def test_a_table_that_changes_between_its_two_readings_is_refused(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.csv"
    lines = table.read_text().splitlines()
    mine.write_text("\n".join(lines) + "\n")
    original = embeddings._check_room

    def swap(*arguments: Any) -> None:
        original(*arguments)
        mine.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")

    monkeypatch.setattr(embeddings, "_check_room", swap)
    with pytest.raises(JacklineError, match="the table of pairs changed while it was being read"):
        prepare(mine, tmp_path / "cache")


def test_shards_go_to_a_mirror_and_come_back_and_nothing_damaged_comes(
    table: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, mirror, there = tmp_path / "here", tmp_path / "mirror", tmp_path / "there"
    keys = prepare(table, here).cache_keys
    assert [len(files_of(key, here)) for key in keys] == [6, 2]
    left = mirror / "embeddings" / keys[0] / ".shard-00000-x.emb.1.copy"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a shard of a copy that was killed")
    os.utime(left, (0, 0))
    assert [copy_out(key, mirror, here) for key in keys] == [6, 2]
    assert not left.exists()
    assert [copy_out(key, mirror, here) for key in keys] == [0, 0]
    broken = list_shards(mirror / "embeddings" / keys[0])[1]
    damage(broken, "vectors")
    list_shards(mirror / "embeddings" / keys[0])[3].unlink()
    lines: list[str] = []
    assert [copy_in(mirror, key, there, lines.append) for key in keys] == [4, 2]
    assert [line for line in lines if line.startswith("warning")] == [
        f"warning: in the mirror {broken.parent}, {broken.name}: the vectors are damaged; its sequences are encoded "
        "again"
    ]
    counts = count_encoded(monkeypatch)
    prepare(table, there)
    assert counts == [SHARD_ROWS, SHARD_ROWS]
    assert contents(there) == undisturbed
    assert copy_out(keys[0], mirror, there) == 1  # what was missing; the damaged one has the same header and stays
    assert copy_in(tmp_path / "nowhere", keys[0], there) == 0
    monkeypatch.setattr(mirrored, "_TELL_EVERY_S", 0.0)
    lines.clear()
    copy_out(keys[1], mirror, there, lines.append)
    assert lines == [f"copied {number} of 2 files to {mirror}/embeddings/{keys[1]}" for number in range(2)]

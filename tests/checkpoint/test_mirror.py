"""Away from this machine: uploads, their three states, and a run that comes back from nothing but its mirror."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem, register_implementation

from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.checkpoint.format.catalogue import MIRROR, list_names, read_uploads
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.mirror.bundle import pack_run, read_tail, unpack_run
from jackline.checkpoint.mirror.engine import LOCK as MIRROR_LOCK
from jackline.checkpoint.mirror.engine import Mirror, MirrorOptions, Requests
from jackline.checkpoint.mirror.fetch import bring_newer, fetch_newest, fetch_run, list_generations, list_runs, within
from jackline.checkpoint.mirror.process import MirrorProcess
from jackline.checkpoint.mirror.progress import LossBounds, MirrorWatch, UploadWait, machine_loss, read_left
from jackline.checkpoint.mirror.store import FolderStore, FsspecStore, Moved, StoreTrouble, open_store, read_checksum
from jackline.checkpoint.mirror.stories import Copies, fetch_story
from jackline.checkpoint.mirror.upload import OwnCheckpoints, own_mirror
from jackline.checkpoint.place import away_from, choose_place
from jackline.checkpoint.writer.lock import read_holder
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.mirror import MirrorRecord, UploadingRecord
from jackline.rundir.records.seen import Skip, add_skip, read_skipped
from tests.checkpoint.states import fingerprint, make_state, train_step, write_small
from tests.deadline import HANGS_S


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = HANGS_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "runs" / "story"
    (path / "attempts" / "001").mkdir(parents=True)
    (path / "run.json").write_text('{"name": "story"}')
    (path / "events-0.jsonl").write_text('{"kind": "start"}\n')
    (path / "out.log").write_text("hello\n")
    (path / "attempts" / "001" / "exit.json").write_text("{}")
    (path / "secret.key").write_text("not to be uploaded")
    return RunDir(path)


def make_mirror(run: RunDir, store: Any) -> Mirror:
    run.checkpoints.mkdir(exist_ok=True)
    return own_mirror(run, store, 100.0)


def next_name(mirror: Mirror, now_s: float, *, is_last: bool = False) -> str | None:
    item = mirror.next_item(now_s, is_last=is_last)
    return item.name if item else None


def upload(mirror: Mirror, step: int) -> None:
    assert isinstance(mirror.source, OwnCheckpoints)
    mirror.upload(mirror.source.item_of(Name(step)))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_upload_is_whole_unique_and_read_back_from_a_disk_of_this_machine(run: RunDir, tmp_path: Path) -> None:
    mirror = make_mirror(run, FolderStore(tmp_path / "far"))
    write_small(run.checkpoints, 7)
    assert next_name(mirror, 0.0) == str(Name(7))
    upload(mirror, 7)
    record = read_uploads(run.checkpoints)[Name(7)]
    assert record.state == "confirmed"
    verify_checkpoint(tmp_path / "far" / str(record.place))
    assert next_name(mirror, 1e9) is None  # nothing new
    mirror.record = MirrorRecord()
    upload(mirror, 7)
    assert len(list_generations(mirror.store, "story")) == 2  # never over one another


def test_the_newest_whole_one_is_due_at_the_mirrors_own_cadence(run: RunDir, tmp_path: Path) -> None:
    mirror = make_mirror(run, FolderStore(tmp_path / "far"))
    assert next_name(mirror, 0.0) is None
    write_small(run.checkpoints, 1)
    write_small(run.checkpoints, 2)
    (run.checkpoints / "step-00000002" / "state.json").unlink()
    assert next_name(mirror, 0.0) == str(Name(1))
    mirror.uploaded_at_s = 10.0
    write_small(run.checkpoints, 3)
    assert next_name(mirror, 109.0) is None
    assert next_name(mirror, 110.0) == str(Name(3))
    assert next_name(mirror, 11.0, is_last=True) == str(Name(3))


def test_an_upload_without_its_manifest_does_not_exist(run: RunDir, tmp_path: Path) -> None:
    class Dying(FolderStore):
        def put_bytes(self, data: bytes, name: str) -> None:
            if name.endswith("manifest.json"):
                raise OSError(5, "Input/output error")
            super().put_bytes(data, name)

    good = make_mirror(run, FolderStore(tmp_path / "far"))
    write_small(run.checkpoints, 1)
    upload(good, 1)
    write_small(run.checkpoints, 2)
    with pytest.raises(OSError):
        upload(make_mirror(run, Dying(tmp_path / "far")), 2)
    empty = tmp_path / "empty"
    fetched = fetch_newest(FolderStore(tmp_path / "far"), "story", empty)
    assert fetched is not None and fetched.name == Name(1)
    assert [refusal.partition(": ")[2] for refusal in fetched.refused] == ["it was never uploaded whole"]
    assert sorted(path.name for path in empty.iterdir()) == ["step-00000001"]


def test_a_damaged_upload_is_passed_over_and_all_damaged_is_an_error(run: RunDir, tmp_path: Path) -> None:
    mirror = make_mirror(run, FolderStore(tmp_path / "far"))
    for step in (1, 2):
        write_small(run.checkpoints, step)
        upload(mirror, step)
    newest = tmp_path / "far" / str(mirror.record.checkpoints[str(Name(2))].place) / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    fetched = fetch_newest(mirror.store, "story", tmp_path / "empty")
    assert fetched is not None and fetched.name == Name(1)
    oldest = tmp_path / "far" / str(mirror.record.checkpoints[str(Name(1))].place) / "manifest.json"
    oldest.write_text("{}")
    with pytest.raises(CannotResume, match="no checkpoint in the mirror is whole"):
        fetch_newest(mirror.store, "story", tmp_path / "empty2")


def test_old_generations_go_but_never_the_newest_three(run: RunDir, tmp_path: Path) -> None:
    mirror = make_mirror(run, FolderStore(tmp_path / "far"))
    for step in range(1, 7):
        write_small(run.checkpoints, step)
        upload(mirror, step)
        mirror.upload_story()
        (run.path / "out.log").write_text(f"line {step}\n")
    assert [generation.name.step for generation in list_generations(mirror.store, "story")] == [6, 5, 4]
    assert len([name for name in mirror.store.names("story") if name.startswith("run-")]) == 3


def test_the_story_goes_along_and_nothing_else(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = RunDir(tmp_path / "there")
    there.path.mkdir()
    data = pack_run(run)
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: 1e9)  # whenever it is packed
        assert pack_run(run) == data
    assert unpack_run(data, there) == ["attempts/001/exit.json", "events-0.jsonl", "out.log", "run.json"]
    assert unpack_run(data, there) == []  # what is there stays
    assert (there.path / "out.log").read_text() == "hello\n"
    big = tmp_path / "big.log"
    big.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert read_tail(big, 20).decode() == "line 998\nline 999\n"


def test_batches_that_were_left_out_are_uploaded_before_later_checkpoints(run: RunDir, tmp_path: Path) -> None:
    """Without them a resume on another machine would train the bad batch again, and silently."""
    add_skip(run, Skip(3, 5), None)

    class Dying(FolderStore):
        def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
            raise OSError(5, "the machine is lost")

    mirror = make_mirror(run, Dying(tmp_path / "far"))
    write_small(run.checkpoints, 7)
    assert not mirror.work(0.0)
    there = RunDir(tmp_path / "there" / "story")
    fetch_story(FolderStore(tmp_path / "far"), "story", there)
    assert str(read_skipped(there)) == str(read_skipped(run)) == "3:5"


def test_an_archive_of_an_enemy_lands_nowhere_else(tmp_path: Path) -> None:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("../evil.json", "/tmp/jackline-evil.json", "attempts/../../evil.json", "run.json/../../evil"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
        link = tarfile.TarInfo("run.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    run = RunDir(tmp_path / "a" / "run")
    run.path.mkdir(parents=True)
    assert unpack_run(buffer.getvalue(), run) == []
    assert files_in(tmp_path) == []


def test_a_run_comes_back_on_an_empty_machine_from_its_mirror_alone(run: RunDir, tmp_path: Path) -> None:
    far = str(tmp_path / "far")
    engine = CheckpointEngine(run, EngineSettings(mirror=far, mirror_every_s=0.1))
    state = make_state()
    for step in (1, 2, 3):
        train_step(state)
        assert engine.save(state, step=step, wait="writer").wait(HANGS_S)
    texts: list[str] = []

    def has_heard() -> bool:
        texts.extend(event.text for event in engine.poll())
        return "uploaded step-00000003 to the mirror (confirmed)" in texts

    wait_until(has_heard, "the mirror to confirm step 3")
    bounds = engine.bounds()
    assert bounds.mirror_state == "confirmed" and bounds.machine_s is not None
    engine.close()
    wait_until(lambda: any("run-" in name for name in files_in(tmp_path / "far")), "the story to be uploaded")
    wait_until(lambda: not mirror_lives(run), "the mirror to end")
    before = fingerprint(state)
    shutil.rmtree(run.path)  # the machine is lost

    assert list_runs(far) == ["story"]
    there = RunDir(tmp_path / "elsewhere" / "story")
    fetched = fetch_run(far, "story", there)
    assert fetched.name == Name(3) and (there.path / "run.json").exists() and (there.path / "out.log").exists()
    again = CheckpointEngine(there)
    other = make_state(seed=8)
    receipt = again.load_newest(other)
    again.close()
    assert receipt is not None and receipt.step == 3 and fingerprint(other) == before


def test_an_engine_with_a_mirror_fetches_what_it_does_not_have(run: RunDir, tmp_path: Path) -> None:
    far = str(tmp_path / "far")
    engine = CheckpointEngine(run, EngineSettings(mirror=far, mirror_every_s=0.1))
    state = make_state()
    assert engine.save(state, step=5).wait(HANGS_S)
    engine.close()
    wait_until(lambda: read_uploads(run.checkpoints).get(Name(5)), "the last upload after the close")
    before = fingerprint(state)
    wait_until(lambda: not mirror_lives(run), "the mirror to end")
    shutil.rmtree(run.checkpoints)
    again = CheckpointEngine(run, EngineSettings(mirror=far))
    other = make_state(seed=1)
    receipt = again.load_newest(other)
    texts = [event.text for event in again.close()]
    assert receipt is not None and receipt.step == 5 and fingerprint(other) == before
    assert f"fetched step-00000005 from the mirror {far}" in texts
    fresh = CheckpointEngine(RunDir(tmp_path / "runs" / "story2"), EngineSettings(mirror=far))
    assert fresh.load_newest(make_state()) is None  # another run's checkpoints are not taken
    fresh.close()


def mirror_lives(run: RunDir) -> bool:
    from jackline.rundir.process_id import is_alive

    return is_alive(read_holder(run.checkpoints / MIRROR_LOCK).writer)


def test_a_broken_mirror_is_said_and_delays_nothing_and_is_tried_again(run: RunDir, tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.write_text("a file where a folder should be")
    engine = CheckpointEngine(run, EngineSettings(mirror=str(far), mirror_every_s=0.1))
    state = make_state()
    assert engine.save(state, step=1).wait(HANGS_S)
    texts: list[str] = []

    def hears(part: str) -> bool:
        texts.extend(event.text for event in engine.poll())
        return any(part in text for text in texts)

    wait_until(lambda: hears("the mirror cannot be reached: "), "the trouble to be said")
    assert engine.save(state, step=2, wait="writer").wait(HANGS_S)
    far.unlink()
    wait_until(lambda: hears("to the mirror (confirmed)"), "the mirror to try again")
    engine.close()


def test_a_hanging_mirror_delays_no_save_and_no_end(run: RunDir, tmp_path: Path) -> None:
    engine = CheckpointEngine(run, EngineSettings(mirror=str(tmp_path / "far"), mirror_every_s=0.1))
    state = make_state()
    assert engine.save(state, step=1).wait(HANGS_S)
    wait_until(lambda: mirror_lives(run), "the mirror to start")
    holder = read_holder(run.checkpoints / MIRROR_LOCK).writer
    assert holder is not None
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        for step in range(2, 6):
            assert engine.save(state, step=step, wait="writer").wait(HANGS_S)
        engine.close()
    finally:
        os.kill(holder.pid, signal.SIGKILL)


def test_a_folder_that_is_being_deleted_never_replaces_the_records_in_the_mirror(run: RunDir, tmp_path: Path) -> None:
    (run.attempt(1).path / "start.json").write_text("{}")
    mirror = make_mirror(run, FolderStore(tmp_path / "far"))
    mirror.upload_story()
    shutil.rmtree(run.attempt(1).path.parent)  # where a deletion may have come to
    (run.path / "out.log").write_text("something new\n")
    mirror.upload_story()
    there = RunDir(tmp_path / "there")
    kept = [name for name in mirror.store.names("story") if name.startswith("run-")]
    assert kept == ["run-000001.tar.gz"]
    unpack_run((tmp_path / "far" / "story" / kept[0]).read_bytes(), there)
    assert there.last_attempt() is not None


def test_any_store_of_fsspec_will_do(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = open_store("memory://bucket/some/where")
    assert isinstance(store, FsspecStore)
    mirror = make_mirror(run, store)
    write_small(run.checkpoints, 4)
    upload(mirror, 4)
    mirror.upload_story()
    assert read_uploads(run.checkpoints)[Name(4)].state == "uploaded"  # nobody has vouched for it
    fetched = fetch_newest(store, "story", tmp_path / "empty")
    assert fetched is not None and fetched.name == Name(4)
    mirror.store.delete("story")
    assert list_generations(store, "story") == []


class Refusing(AbstractFileSystem):  # type: ignore[misc]
    """As a client whose errors are its own, and whose words hold a secret."""

    protocol = "refusing"

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        raise LookupError(f"no credentials for https://me:hidden@host/{path}")

    _open = mkdir = makedirs = info = ls


def test_what_a_client_raises_is_an_error_of_the_mirror_in_words(tmp_path: Path) -> None:
    register_implementation("refusing", Refusing, clobber=True)
    store = open_store("refusing://bucket/x")
    (tmp_path / "file").write_text("x")
    calls: list[Callable[[], object]] = [
        lambda: store.names("a"),
        lambda: store.size("a"),
        lambda: store.checksum("a"),
        lambda: store.put_bytes(b"", "a/b"),
        lambda: store.put(tmp_path / "file", "a/b"),
    ]
    for call in calls:
        with pytest.raises(StoreTrouble, match=r"^LookupError: no credentials for https://") as raised:
            call()
        assert raised.value.place == "refusing://bucket/x" and "hidden" not in str(raised.value)
    with pytest.raises(JacklineError, match="mirror refusing://bucket/x cannot be read: LookupError") as told:
        Copies("refusing://bucket/x").renew()
    assert told.value.hint == StoreTrouble.hint and "hidden" not in str(told.value)
    with pytest.raises(StoreTrouble, match="ConnectionRefusedError"):
        open_store("ftp://127.0.0.1:1/x")


def test_a_stores_own_checksum_confirms_and_a_wrong_one_does_not(run: RunDir, tmp_path: Path) -> None:
    class Vouching(FolderStore):
        lie = ""

        def local_path(self, name: str) -> Path | None:
            return None

        def checksum(self, name: str) -> tuple[str, str] | None:
            found = hashlib.md5(self.read(name)).hexdigest()
            return "md5", "0" * 32 if self.lie and name.endswith(self.lie) else found

    store = Vouching(tmp_path / "far")
    mirror = make_mirror(run, store)
    write_small(run.checkpoints, 1)
    upload(mirror, 1)
    assert mirror.record.checkpoints[str(Name(1))].state == "confirmed"
    store.lie = "state.json"
    write_small(run.checkpoints, 2)
    upload(mirror, 2)
    assert mirror.record.checkpoints[str(Name(2))].state == "uploaded"


def test_what_stores_say_of_their_objects_is_understood() -> None:
    md5 = hashlib.md5(b"x").digest()
    assert read_checksum({"md5Hash": base64.b64encode(md5).decode()}) == ("md5", md5.hex())
    assert read_checksum({"content_md5": bytearray(md5)}) == ("md5", md5.hex())
    assert read_checksum({"ETag": f'"{md5.hex()}"'}) == ("md5", md5.hex())
    assert read_checksum({"ETag": f'"{md5.hex()}-3"'}) is None  # an upload in parts
    assert read_checksum({"lfs": {"sha256": "ab"}}) == ("sha256", "ab")
    assert read_checksum({"size": 5}) is None


def test_a_store_that_does_not_answer_is_left_after_a_while_when_there_is_something_here(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: time.sleep(5) or [])  # type: ignore[func-returns-value]
    run.checkpoints.mkdir()
    write_small(run.checkpoints, 1)
    assert bring_newer("nowhere://x", "story", run.checkpoints) == [
        "the mirror cannot be read: error: the mirror nowhere://x cannot be used: Protocol not known: nowhere; "
        "continuing with what is here"
    ]
    with pytest.raises(UsageError):
        open_store("nowhere://x")
    assert list_names(run.checkpoints) == [Name(1)]


def test_both_bounds_are_told_in_words() -> None:
    assert LossBounds(41.0, 360.0, "uploaded").text() == (
        "at risk: 41 s; if the machine is lost, 6 min (last upload, unconfirmed)"
    )
    assert machine_loss((100.0, "confirmed"), now_s=160.0) == (60.0, "confirmed")
    assert machine_loss(None) == (None, "local")


def test_a_clock_that_jumped_back_does_not_make_the_loss_look_small(tmp_path: Path) -> None:
    from jackline.checkpoint.format.catalogue import write_notes

    watch = MirrorWatch(tmp_path)
    write_notes(tmp_path, MIRROR, {Name(1): {"state": "uploaded", "saved_at_s": 5000.0}})
    watch.look(10.0)
    watch.look(300.0)
    # By the wall clock the upload is of the future; by the other one it has been known for 290 s.
    assert machine_loss(watch.newest, now_s=4000.0, known_s=watch.known_s(300.0)) == (290.0, "uploaded")
    assert machine_loss(watch.newest, now_s=6000.0, known_s=watch.known_s(300.0)) == (1000.0, "uploaded")
    write_notes(tmp_path, MIRROR, {Name(2): {"state": "uploaded", "saved_at_s": 4010.0}})
    watch.look(310.0)
    assert watch.known_s(312.0) == 2.0


def test_the_watch_looks_once_a_second_and_tells_each_change_once(tmp_path: Path) -> None:
    from jackline.checkpoint.format.catalogue import write_notes

    watch = MirrorWatch(tmp_path)
    assert watch.look(10.0) == []
    write_notes(tmp_path, MIRROR, {Name(1): {"state": "uploaded", "saved_at_s": 5.0}})
    assert watch.look(10.5) == []
    assert [event.text for event in watch.look(11.0)] == ["uploaded step-00000001 to the mirror (uploaded)"]
    assert watch.look(13.0) == []
    write_notes(tmp_path, MIRROR, {Name(1): {"state": "confirmed", "saved_at_s": 5.0}}, trouble={"why": "gone"})
    assert [event.text for event in watch.look(15.0)] == [
        "uploaded step-00000001 to the mirror (confirmed)",
        "the mirror cannot be reached: gone; trying again",
    ]


def test_a_run_on_a_mount_is_committed_locally_and_mirrored_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "drive" / "story")
    assert choose_place(run).folder == run.checkpoints and choose_place(run).mirror is None
    place = away_from(run, "fuse.drive")
    assert place.mirror == str(tmp_path / "drive")
    assert str(place.folder).startswith(str(tmp_path / "state"))
    assert place.folder == away_from(run, "nfs4").folder
    assert place.why == (
        f"{run.path} is on fuse.drive, so checkpoints are committed to {place.folder} and copied there"
    )


# -- repair ---------------------------------------------------------------------------------------------------------


def test_what_the_store_has_lost_or_damaged_is_uploaded_again(run: RunDir, tmp_path: Path) -> None:
    """A restarted mirror, and the last upload of a run, look at the store instead of trusting mirror.json."""
    far = tmp_path / "far"
    write_small(make_mirror(run, FolderStore(far)).run.checkpoints, 1)
    for damage in (
        lambda place: (place / "manifest.json").unlink(),
        lambda place: shutil.rmtree(place),
        lambda place: (place / "model.safetensors").write_bytes(b"short"),
        lambda place: _flip(place / "model.safetensors"),
    ):
        mirror = make_mirror(run, FolderStore(far))
        mirror.load()
        assert mirror.work(0.0, is_last=True)
        place = far / str(mirror.record.checkpoints[str(Name(1))].place)
        verify_checkpoint(place)
        damage(place)
        again = make_mirror(run, FolderStore(far))
        again.load()
        assert again.work(0.0)
        fetched = fetch_newest(FolderStore(far), "story", tmp_path / f"there-{place.name}")
        assert fetched is not None and fetched.name == Name(1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_an_unfinished_upload_is_removed_once_the_same_checkpoint_is_there(run: RunDir, tmp_path: Path) -> None:
    class Dying(FolderStore):
        def put_bytes(self, data: bytes, name: str) -> None:
            raise OSError(5, "Input/output error")

    write_small(make_mirror(run, FolderStore(tmp_path / "far")).run.checkpoints, 1)
    assert not make_mirror(run, Dying(tmp_path / "far")).work(0.0)
    assert len(FolderStore(tmp_path / "far").names("story/checkpoints")) == 1
    mirror = make_mirror(run, FolderStore(tmp_path / "far"))
    assert mirror.work(0.0)
    place = str(mirror.record.checkpoints[str(Name(1))].place)
    assert FolderStore(tmp_path / "far").names("story/checkpoints") == [place.rpartition("/")[2]]


def test_how_far_an_upload_is_can_be_read_while_it_runs(run: RunDir, tmp_path: Path) -> None:
    seen = []

    class Watched(FolderStore):
        def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
            super().put(local, name, moved)
            mirror._wrote_at_s = 0.0  # no pause between two notes
            seen.append(read_left(run.checkpoints))

    mirror = make_mirror(run, Watched(tmp_path / "far"))
    write_small(run.checkpoints, 3)
    assert mirror.work(0.0)
    assert all(left is not None and left.name == "step-00000003" for left in seen)
    done = [left.done_bytes for left in seen if left is not None]
    assert done == sorted(done) and read_left(run.checkpoints) is None
    size = seen[0].total_bytes if seen[0] else None
    assert size == sum(path.stat().st_size for path in (run.checkpoints / "step-00000003").iterdir())


def test_a_wait_for_the_last_upload_ends_when_no_byte_moves_and_not_before() -> None:
    wait = UploadWait(7, 60.0, 0.0)
    assert wait.look(MirrorRecord(), 59.0) == "waiting"
    assert wait.look(MirrorRecord(uploading=UploadingRecord("a", 1, 9)), 100.0) == "waiting"
    assert wait.look(MirrorRecord(uploading=UploadingRecord("a", 2, 9)), 159.0) == "waiting"
    assert wait.look(MirrorRecord(uploading=UploadingRecord("a", 2, 9), answered=6), 160.0) == "waiting"
    assert wait.look(MirrorRecord(uploading=UploadingRecord("a", 2, 9), answered=6), 220.0) == "given up"
    assert wait.look(MirrorRecord(answered=7), 500.0) == "done"


def test_a_wait_for_the_last_upload_begins_when_the_process_that_uploads_has_started() -> None:
    wait, old = UploadWait(7, 1.0, 0.0), MirrorRecord(process=ProcessId(4, 1, "here", "boot"))
    assert [wait.look(old, at_s, pid=5) for at_s in (2.0, 9.0)] == ["waiting", "waiting"]
    new = MirrorRecord(process=ProcessId(5, 1, "here", "boot"))
    assert [wait.look(new, at_s, pid=5) for at_s in (9.5, 10.0)] == ["waiting", "given up"]
    never = UploadWait(7, 1.0, 0.0)
    assert [never.look(old, at_s, pid=5) for at_s in (59.0, 60.5)] == ["waiting", "given up"]


def test_an_upload_that_fails_at_the_same_byte_again_and_again_is_no_progress() -> None:
    wait = UploadWait(7, 60.0, 0.0)
    states = [wait.look(MirrorRecord(uploading=UploadingRecord("a", done, 9)), 10.0 * at) for at, done in TRIES]
    assert states == ["waiting"] * 9 + ["given up"]


# at which second, in tens, how many bytes of a try were uploaded: the third gets further, then none does
TRIES = [(0, 0), (1, 4), (2, 0), (3, 5), (4, 0), (5, 4), (6, 0), (7, 5), (8, 0), (9, 4)]


def test_a_process_that_ends_is_started_again_with_longer_and_longer_pauses() -> None:
    process = MirrorProcess([sys.executable, "-c", "input(); exit(7)"], MirrorOptions("", "", 1.0, os.getpid()))
    pauses, now_s = [], 100.0
    for _ in range(4):
        assert process.tend(now_s) == ""  # starts it
        pid = process.pid
        why = ""
        while not why:
            why = process.tend(now_s)
        assert why == f"its process {pid} exited with code 7"
        pauses.append(process.due_in_s(now_s))
        assert process.tend(now_s + 0.5) == "" and process.pid is None  # not before its pause is over
        now_s += pauses[-1] or 0.0
    assert pauses == [1.0, 2.0, 4.0, 8.0]


def test_a_request_that_comes_with_the_options_is_heard() -> None:
    reader, writer = os.pipe()
    options = MirrorOptions("run", "place", 1.0, 5, folder="folder")
    os.write(writer, options.to_line() + b"12\n1")
    requests = Requests(reader)
    assert requests.read_options() == options and requests.number == 12
    os.write(writer, b"3\n")
    requests.wait(HANGS_S)
    assert requests.number == 13
    os.close(writer)
    requests.wait(HANGS_S)
    os.close(reader)


def test_two_mirrors_of_one_run_do_not_take_each_others_number(run: RunDir, tmp_path: Path) -> None:
    class Late(FolderStore):
        """The other mirror uploads its records between our look and our upload."""

        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            if folder == "story" and "run-000001.tar.gz" not in found:
                FolderStore(tmp_path / "far").put_bytes(b"theirs", "story/run-000001.tar.gz")
            return found

    assert make_mirror(run, Late(tmp_path / "far")).work(0.0)
    assert FolderStore(tmp_path / "far").names("story") == ["run-000001.tar.gz", "run-000002.tar.gz"]

"""What is sent is sent once: after a crash of the training, of the exporter, and of the other side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.errors import JacklineError
from jackline.exporters.reader import (
    EVENTS,
    MAX_BEHIND_BYTES,
    PORTION_BYTES,
    About,
    Message,
    Points,
    Reader,
    about_run,
    export_name,
)
from jackline.exporters.sending import Refused, Sending
from jackline.rundir.layout import RunDir
from tests.rundir.made import gone_process, make_run, this_process, write_exit, write_start, write_state


def log(run: RunDir, *steps: float, name: str = "loss") -> None:
    with open(run.metrics(), "a") as file:
        file.writelines(json.dumps({"step": step, "at_s": 5.0, name: step / 10}) + "\n" for step in steps)


def happen(run: RunDir, event: str, text: str, at_s: float = 7.0) -> None:
    with open(run.supervisor_events, "a") as file:
        file.write(json.dumps({"at_s": at_s, "event": event, "text": text}) + "\n")


class Place:
    """A tracker that keeps what it got; it fails, and dies before its answer, as it is told."""

    takes_points = True
    events = frozenset(EVENTS)

    def __init__(self, has: Mapping[str, float] | None = None) -> None:
        self.rows: list[tuple[float | None, dict[str, float]]] = []
        self.messages: list[str] = []
        self.failures = 0
        self.refuses = ""
        self.closed = ""
        self.has = dict(has or {})

    def open(self, about: About) -> Mapping[str, float]:
        return self.has

    def send_points(self, points: tuple[Points, ...]) -> None:
        self._fail()
        self.rows += [(point.step, dict(point.values)) for point in points]

    def send_message(self, about: About, message: Message) -> None:
        self._fail()
        if message.event == self.refuses:
            raise Refused("HTTP 404 Not Found")
        self.messages.append(f"{message.event}: {message.text}")

    def close(self, state: str) -> None:
        self.closed = state

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")

    @property
    def steps(self) -> list[float | None]:
        return [step for step, _ in self.rows]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = make_run(tmp_path / "mine", created_at_s=1.0)
    write_start(found, gone_process())
    write_exit(found, 0, cause="finished", ended_at_s=9.0, started_at_s=1.0)
    return found


def work(run: RunDir, place: Place, **more: Any) -> int:
    reader = Reader(run, "place-1", "place")
    assert reader.try_lock()
    try:
        return Sending(reader, place, lambda text: None, sleep=lambda seconds: None, **more).work()
    finally:
        reader.close()


def test_a_finished_run_is_sent_whole_and_then_nothing_more(run: RunDir) -> None:
    log(run, 1, 2, 3)
    place = Place()
    assert work(run, place) == 3
    assert place.steps == [1, 2, 3] and place.closed == "finished"
    assert work(run, place) == 0 and place.steps == [1, 2, 3]
    log(run, 4)
    assert work(run, place) == 1 and place.steps == [1, 2, 3, 4]


def test_steps_that_are_trained_again_after_a_crash_are_not_sent_again(run: RunDir) -> None:
    log(run, *range(1, 13))
    place = Place()
    work(run, place)
    log(run, *range(9, 16))  # resumed from step 8
    work(run, place)
    assert place.steps == list(range(1, 16))


def test_a_name_that_begins_later_is_sent_from_its_beginning(run: RunDir) -> None:
    log(run, 1, 2, 3)
    place = Place()
    work(run, place)
    log(run, 2, 3, name="val_loss")
    work(run, place)
    assert place.rows[3:] == [(2, {"val_loss": 0.2}), (3, {"val_loss": 0.3})]


def test_an_exporter_that_was_killed_before_it_recorded_asks_the_other_side(run: RunDir) -> None:
    log(run, 1, 2, 3, 4)
    place = Place(has={"loss": 3.0})
    assert work(run, place) == 1 and place.steps == [4]


def test_a_failing_place_is_tried_again_and_catches_up(run: RunDir) -> None:
    log(run, 1, 2)
    happen(run, "died", "out of memory")
    place = Place()
    place.failures = 5
    work(run, place)
    assert place.steps == [1, 2] and place.messages == ["crashed: out of memory"]


def test_what_could_not_be_sent_is_sent_by_the_next_call(run: RunDir) -> None:
    log(run, 1, 2)
    place = Place()
    place.failures = 10**6
    with pytest.raises(JacklineError) as error:
        work(run, place, patience_s=10.0)
    assert str(error.value) == (
        "error: not everything was sent: ConnectionError: no route to host\n"
        "hint: the same command sends the rest later; nothing is sent twice"
    )
    stored = json.loads((run.path / "exports" / "place-1.json").read_text())
    assert stored["trouble"] == "ConnectionError: no route to host"
    place.failures = 0
    work(run, place)
    assert place.steps == [1, 2]


def test_a_message_that_is_refused_does_not_hold_up_the_next(run: RunDir) -> None:
    happen(run, "stuck", "waiting for a lock", 5.0)
    happen(run, "died", "killed", 6.0)
    place = Place()
    place.refuses = "stuck"
    work(run, place)
    assert place.messages == ["crashed: killed"]
    work(run, place)
    assert place.messages == ["crashed: killed"]


def test_messages_are_told_once_and_without_secrets(run: RunDir) -> None:
    happen(run, "note", "not told")
    happen(run, "finished", "done with --api-key hunter2secret")
    place = Place()
    work(run, place)
    work(run, place)
    assert place.messages == ["done: done with --api-key ***"]


def test_the_first_step_after_a_resume_is_told_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    write_start(run, this_process(), 2)
    reader = Reader(run, "place-1", "place")
    assert reader.try_lock()

    def look(step: int) -> list[str]:
        progress = {"done": step, "total": 100, "unit": "steps"}
        write_state(run, this_process(), attempt=2, child=this_process().to_json(), progress=progress)
        batch = reader.read(points=False, events=frozenset(EVENTS))
        for message in batch.messages:
            reader.commit_message(message)
        reader.commit()
        return [message.text for message in batch.messages]

    assert [look(step) for step in (40, 40, 41, 42)] == [[], [], ["attempt 2 trains again: step 41"], []]
    reader.close()


def test_a_message_says_how_far_a_script_is_that_only_prints(run: RunDir) -> None:
    progress = {"done": 41, "total": 100, "unit": "steps"}
    printed = [{"name": "loss", "value": 2.5}]
    write_state(run, gone_process(), attempt=1, progress=progress, printed=printed)
    happen(run, "died", "killed\n       peak memory 3 GiB")
    (message,) = Reader(run, "place-1", "place").read(points=False, events=frozenset(EVENTS)).messages
    assert (message.step, message.total, dict(message.metrics)) == (41, 100, {"loss": 2.5})
    assert message.text == "killed\npeak memory 3 GiB"


def test_a_run_is_sent_to_one_place_by_one_process(run: RunDir) -> None:
    one, two = (Reader(run, "place-1", "place") for _ in range(2))
    assert one.try_lock() and not two.try_lock()
    two.close()
    one.close()
    again = Reader(run, "place-1", "place")
    assert again.try_lock()
    again.close()


def test_printed_numbers_count_only_where_the_loop_logs_none_of_that_name(run: RunDir) -> None:
    log(run, 1, 2)
    place = Place()
    work(run, place)
    rows = [{"step": 3, "at_s": 5.0, "loss": 9.0, "acc": 0.5}]
    run.printed_metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work(run, place)
    assert place.rows[2:] == [(3, {"acc": 0.5})]


def test_the_name_of_an_exporters_files_does_not_hold_its_address() -> None:
    name = export_name("slack", "https://hooks.example/T000/SECRET")
    assert name.startswith("slack-") and "SECRET" not in name and len(name) < 20


def test_a_run_has_the_same_identity_wherever_it_is_copied(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    other.run_file.write_bytes(run.run_file.read_bytes())
    assert about_run(other).id == about_run(run).id


def test_half_a_character_in_run_json_does_not_stop_a_sender(run: RunDir) -> None:
    known = json.loads(run.run_file.read_text())
    run.run_file.write_text(json.dumps({**known, "host": "half \ud83d"}))
    assert about_run(run).id


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_however_training_and_exporter_crash_each_point_is_sent_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random lengths of training between resumes, exporters that fail at any call, torn last lines."""
    run = make_run(tmp_path_factory.mktemp("run") / "mine")
    write_start(run, gone_process())
    write_exit(run, 0, cause="finished")
    place, step, farthest = Place(), 0, 0
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.integers(0, step))
        length = data.draw(st.integers(0, 8))
        log(run, *range(step + 1, step + length + 1))
        step += length
        farthest = max(farthest, step)
        with open(run.metrics(), "a") as file:
            file.write('{"step": 1')
        place.failures = data.draw(st.sampled_from([0, 0, 3, 10**6]))
        with contextlib.suppress(JacklineError):
            work(run, place, patience_s=1.0)
        text = run.metrics().read_text().removesuffix('{"step": 1')
        run.metrics().write_text(text)
    place.failures = 0
    work(run, place)
    assert place.steps == list(range(1, farthest + 1))


def test_of_a_file_beyond_all_sense_only_the_end_is_sent(run: RunDir) -> None:
    """Ten gigabytes of nothing, as a damaged disk leaves them, would keep a sender busy for minutes."""
    with open(run.metrics(), "wb") as file:
        file.truncate(10 << 30)
        file.seek(0, 2)
        file.write(b'\n{"at_s": 5.0, "step": 900.0, "loss": 0.5}\n')
    reader = Reader(run, "x", "webhook")
    assert reader.try_lock()
    turns, found = 0, list[Points]()
    while turns < 2000:
        batch = reader.read(points=True, events=frozenset())
        found += batch.points
        reader.commit()
        turns += 1
        if not batch.is_more:
            break
    reader.close()
    assert turns <= MAX_BEHIND_BYTES // PORTION_BYTES + 2
    assert [point.step for point in found] == [900.0]

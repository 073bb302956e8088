"""The engine as a loop uses it: real torch, a real writer process, real files."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.checkpoint.format.catalogue import LOCK, list_names, list_set_aside
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.ticket import Event
from jackline.checkpoint.writer.lock import read_holder, read_work
from jackline.checkpoint.writer.retention import Keep
from jackline.checkpoint.writer.serve import NICENESS
from jackline.errors import CannotResume, UsageError
from jackline.rundir.layout import RunDir
from tests.checkpoint.faults import Fault, fail_at, kill_at, stop_at
from tests.checkpoint.states import fingerprint, make_state, train_step
from tests.deadline import HANGS_S
from tests.machine.test_priority import needs_autogroups

FAULTY = ("python", str(Path(__file__).with_name("faulty_writer.py")))
Make = Callable[..., CheckpointEngine]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "runs" / "story"
    path.mkdir(parents=True)
    return RunDir(path)


@pytest.fixture
def start(run: RunDir) -> Iterator[Make]:
    """Starts engines and closes those that a test leaves open."""
    engines: list[CheckpointEngine] = []

    def make(**settings: Any) -> CheckpointEngine:
        engines.append(CheckpointEngine(run, EngineSettings(**settings)))
        return engines[-1]

    yield make
    for engine in engines:
        if engine.why_off != "the engine is closed":
            engine.close(timeout_s=10)  # some writers were stopped for good


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> tuple[str, ...]:
    import sys

    monkeypatch.setenv("FAULT", fault.to_json())
    return (sys.executable, FAULTY[1])


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = HANGS_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_saved_state_comes_back_bit_for_bit(start: Make, overlap: bool) -> None:
    engine = start()
    state = make_state()
    assert engine.load_newest(state) is None
    prints = {}
    for step in range(1, 7):
        train_step(state, engine.before_change)
        prints[step] = fingerprint(state)
        assert not engine.save(state, step=step, metrics={"loss": 1.5}, overlap=overlap, wait="writer").why
    engine.before_change()
    train_step(state)
    engine.close()
    other = make_state(seed=3)
    receipt = start().load_newest(other)
    assert receipt is not None and receipt.step == 6 and receipt.metrics == {"loss": 1.5}
    assert fingerprint(other) == prints[6]
    assert receipt.lines()[0].startswith("resuming from step-00000006: model, optim, schedule, random, counters; ")


def test_an_overlapped_save_holds_the_state_of_the_call_although_training_went_on(start: Make) -> None:
    engine = start()
    state = make_state(width=256)
    train_step(state)
    before = fingerprint(state)
    ticket = engine.save(state, step=1, overlap=True)
    for _ in range(5):
        train_step(state, engine.before_change)
    assert ticket.wait(HANGS_S)
    other = make_state(width=256)
    engine.load_newest(other)
    assert fingerprint(other) == before


def test_a_loop_that_forgets_the_barrier_gets_no_wrong_checkpoint_and_is_told(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from jackline.checkpoint.staging import stage

    gate = threading.Event()
    finish = stage.Staging.finish

    def slow(staging: Any, on_progress: Any) -> bool:
        gate.wait(HANGS_S)
        return finish(staging, on_progress)

    monkeypatch.setattr(stage.Staging, "finish", slow)
    engine = start()
    state = make_state()
    train_step(state)
    ticket = engine.save(state, step=1, overlap=True)
    train_step(state)  # without before_change
    gate.set()
    assert not ticket.wait(HANGS_S)
    assert ticket.why == "a tensor changed while it was being copied; from now on saves wait for the copy"
    assert list_names(engine.folder) == []
    events = engine.poll()
    assert [event.text for event in events if event.is_loud] == [
        "step 1 could not be saved: a tensor changed while it was being copied; from now on saves wait for the copy"
    ]
    engine._pending = None  # the loop never calls it
    before = fingerprint(state)
    ticket = engine.save(state, step=2, overlap=True)  # is blocking now
    train_step(state)
    assert ticket.wait(HANGS_S)
    other = make_state()
    engine.load_newest(other)
    assert fingerprint(other) == before


def test_after_a_blocking_save_a_loop_may_change_its_state_behind_every_counter(start: Make) -> None:
    engine = start()
    state = make_state(width=256)
    for step in range(1, 6):
        train_step(state, engine.before_change)
        before = fingerprint(state)
        ticket = engine.save(state, step=step, wait="writer")
        state["model"][0].weight.data.zero_()
        state["model"][1].weight.detach().numpy()[:] = 3
        state["model"][1].bias.data = torch.ones(256)
        assert ticket.wait(HANGS_S)
        other = make_state(width=256)
        engine.load_newest(other)
        assert fingerprint(other) == before


def test_a_state_that_another_thread_changes_during_the_copy_is_copied_again(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackline.checkpoint.staging import stage

    engine = start()
    state = make_state()
    copy_at_once, interruptions = stage.copy_at_once, [True]

    def interrupted(moves: Any) -> None:
        copy_at_once(moves)
        if interruptions.pop():
            interruptions.append(False)
            with torch.no_grad():
                state["model"][0].weight.add_(1)

    monkeypatch.setattr(stage, "copy_at_once", interrupted)
    assert engine.save(state, step=1).wait(HANGS_S)
    other = make_state(seed=3)
    engine.load_newest(other)
    assert fingerprint(other) == fingerprint(state) and interruptions == []


def test_a_state_that_never_holds_still_is_refused_and_said(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackline.checkpoint.staging import stage

    engine = start()
    state = make_state()
    copy_at_once = stage.copy_at_once

    def interrupted(moves: Any) -> None:
        copy_at_once(moves)
        with torch.no_grad():
            state["model"][0].weight.add_(1)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "copy_at_once", interrupted)
        ticket = engine.save(state, step=1)
    why = "another thread changed model.0.weight while it was being copied, 3 times in a row"
    assert (ticket.outcome, ticket.why) == ("failed", why)
    assert [event.text for event in engine.poll() if event.is_loud] == [f"step 1 was not saved: {why}"]
    assert not engine.is_busy and list_names(engine.folder) == []
    assert engine.save(state, step=2).wait(HANGS_S)


def test_a_state_in_pieces_that_another_thread_changes_is_not_committed(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackline.checkpoint.staging import pieces

    engine = start(available_memory=lambda: 0)
    state = {"model": nn.Linear(5000, 6000)}
    fill_window = pieces.fill_window

    def interrupted(*words: Any) -> None:
        fill_window(*words)
        with torch.no_grad():
            state["model"].bias.add_(1)

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "fill_window", interrupted)
        ticket = engine.save(state, step=1)
    assert not ticket.wait(HANGS_S)
    assert ticket.why == "another thread changed model.bias while it was being copied"
    assert engine.save(state, step=2).wait(HANGS_S)
    assert list_names(engine.folder) == [Name(2)]


@pytest.mark.parametrize("how", ["rebind", "resize"])
def test_memory_that_a_loop_gives_up_during_an_overlapped_copy_crashes_nothing(
    start: Make, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Rebound, the memory is held and the save is right; resized, it is gone and the save is cancelled."""
    import threading

    from jackline.checkpoint.staging import stage

    gate = threading.Event()
    finish = stage.Staging.finish

    def slow(staging: Any, on_progress: Any) -> bool:
        gate.wait(HANGS_S)
        return finish(staging, on_progress)

    monkeypatch.setattr(stage.Staging, "finish", slow)
    engine = start()
    state = large_state()
    before = fingerprint(large_state())  # of an equal one: numpy forbids to resize a storage that it has seen
    ticket = engine.save(state, step=1, overlap=True)
    engine._pending = None  # a loop that declares nothing
    for parameter in state["model"].parameters():
        if how == "rebind":
            parameter.data = torch.zeros_like(parameter)
        else:
            parameter.untyped_storage().resize_(0)
    gate.set()
    assert ticket.wait(HANGS_S) == (how == "rebind")
    if how == "rebind":
        other = large_state()
        engine.load_newest(other)
        assert fingerprint(other) == before
    else:
        assert list_names(engine.folder) == [] and "a tensor changed while it was being copied" in ticket.why


def test_the_files_are_plain_safetensors(start: Make) -> None:
    engine = start()
    state = make_state()
    train_step(state)
    assert engine.save(state, step=1).wait(HANGS_S)
    weights = load_file(engine.folder / "step-00000001" / "model.safetensors")
    assert torch.equal(weights["0.weight"], state["model"][0].weight)
    moments = load_file(engine.folder / "step-00000001" / "optim.safetensors")
    assert torch.equal(moments["state.0.exp_avg"], state["optim"].state_dict()["state"][0]["exp_avg"])


def test_a_busy_writer_means_a_skipped_save_that_is_said(start: Make, tmp_path: Path, monkeypatch: Any) -> None:
    fired = str(tmp_path / "fired")
    engine = start(writer_command=with_fault(monkeypatch, stop_at(3, call="write", fired=fired)))
    state = make_state()
    train_step(state)
    first = engine.save(state, step=1)
    wait_until(lambda: read_work(engine._link.writer.pid)[1], "the writer to hang")
    second = engine.save(state, step=2)
    assert (second.outcome, second.why) == ("skipped", "the save before it is still being written")
    assert [event.text for event in engine.poll()] == [
        "step 2 was not saved: the save before it is still being written"
    ]
    os.kill(engine._link.writer.pid, signal.SIGCONT)
    assert first.wait(HANGS_S)
    assert engine.save(state, step=3).wait(HANGS_S)
    assert list_names(engine.folder) == [Name(3), Name(1)]


def test_a_writer_stopped_by_a_signal_is_woken_when_it_holds_up_a_save(
    start: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    fired = str(tmp_path / "fired")
    engine = start(writer_command=with_fault(monkeypatch, stop_at(3, call="write", fired=fired)))
    state = make_state()
    train_step(state)
    first = engine.save(state, step=1)
    pid = engine._link.writer.pid
    assert engine.save(state, step=2, wait="writer").wait(HANGS_S)  # nobody sends SIGCONT
    assert first.outcome == "committed" and os.path.exists(fired)
    assert [event.text for event in engine.poll() if event.is_loud] == [
        f"the checkpoint writer (process {pid}) was stopped by a signal; waking it"
    ]
    assert list_names(engine.folder) == [Name(2), Name(1)]


@pytest.mark.parametrize("nth", range(1, 25))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_around_any_call_costs_nothing(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, when: Any
) -> None:
    """The staged state is still in the arena: a new writer commits it."""
    fired = tmp_path / "fired"
    engine = start(writer_command=with_fault(monkeypatch, kill_at(nth, when, fired=str(fired))))
    state = make_state()
    train_step(state)
    before = fingerprint(state)
    assert engine.save(state, step=1).wait(HANGS_S)
    assert fired.exists() or nth > 20, "the fault did not strike"
    events = engine.poll()
    assert ("writer_died" in kinds(events)) == fired.exists()
    for name in list_names(engine.folder):
        verify_checkpoint(engine.folder / str(name))
    other = make_state(seed=2)
    receipt = engine.load_newest(other)
    assert receipt is not None and receipt.step == 1 and fingerprint(other) == before


def test_a_disk_that_fills_while_writing_costs_one_save_and_not_the_training(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = fail_at("write", nth=2, with_errno=errno.ENOSPC)
    engine = start(writer_command=with_fault(monkeypatch, fault))
    state = make_state()
    train_step(state)
    ticket = engine.save(state, step=1)
    assert not ticket.wait(HANGS_S)
    assert ticket.why == "the disk is full"
    assert [event.text for event in engine.poll() if event.is_loud] == [
        "step 1 could not be saved: the disk is full; training continues without this checkpoint"
    ]
    assert list(path.name for path in engine.folder.iterdir() if path.name.startswith((".", "step"))) == []
    assert engine.save(state, step=2).wait(HANGS_S)


def test_a_parent_that_cannot_be_synced_is_not_acknowledged_but_can_be_loaded(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(writer_command=with_fault(monkeypatch, fail_at("sync_folder", nth=2)))
    state = make_state()
    train_step(state)
    before = fingerprint(state)
    ticket = engine.save(state, step=1)
    assert not ticket.wait(HANGS_S)
    assert ticket.why == "step-00000001 is written, but its folder could not be synced"
    assert list_names(engine.folder) == [Name(1)]
    train_step(state)
    assert engine.save(state, step=2).wait(HANGS_S)
    other = make_state()
    (engine.folder / "step-00000002" / "manifest.json").write_text("{}")
    receipt = engine.load_newest(other)
    assert receipt is not None and receipt.step == 1 and fingerprint(other) == before


def test_a_damaged_newest_one_is_named_set_aside_and_the_one_before_used(start: Make) -> None:
    engine = start(keep=Keep(last=3))
    state = make_state()
    prints = {}
    for step in (1, 2):
        train_step(state)
        prints[step] = fingerprint(state)
        assert engine.save(state, step=step, wait="writer").wait(HANGS_S)
    engine.close()
    path = engine.folder / "step-00000002" / "optim.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    again = start()
    other = make_state(seed=4)
    receipt = again.load_newest(other)
    assert receipt is not None and receipt.step == 1 and fingerprint(other) == prints[1]
    why = "optim.safetensors has wrong bytes between 0 B and 6.4 KiB"
    assert receipt.lines()[1] == f"  step-00000002 is not whole and was passed over: {why}"
    assert [event.text for event in again.poll() if event.kind == "passed_over"] == [
        f"step-00000002 is not whole and was passed over: {why}"
    ]
    wait_until(lambda: list_set_aside(again.folder), "the damaged one to be set aside")
    train_step(other)
    assert again.save(other, step=2).wait(HANGS_S)  # its place is free again
    assert list_names(again.folder) == [Name(2), Name(1)]


def test_with_every_one_damaged_nothing_is_started_silently_from_scratch(start: Make) -> None:
    engine = start()
    state = make_state()
    train_step(state)
    assert engine.save(state, step=1).wait(HANGS_S)
    wait_until(lambda: "verified" in kinds(engine.poll()), "the writer to read it back")
    (engine.folder / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(CannotResume) as caught:
        engine.load_newest(make_state())
    lines = str(caught.value).split("\n")
    assert lines[0] == f"error: none of the 1 checkpoints in {engine.folder} is whole"
    assert lines[1].startswith("       step-00000001: state.json is 2 B, the manifest says ")
    assert lines[2:] == ["hint: resume from a mirror (jackline resume URL), or start over: --new"]
    assert caught.value.exit_code == 3
    wait_until(lambda: list_set_aside(engine.folder), "the damaged one to be set aside")
    with pytest.raises(CannotResume, match="found damaged earlier and set aside"):
        engine.load_newest(make_state())


def test_a_chosen_step_is_loaded_and_a_missing_one_refused(start: Make) -> None:
    engine = start()
    state = make_state()
    prints = {}
    for step in (1, 2):
        train_step(state)
        prints[step] = fingerprint(state)
        engine.save(state, step=step, wait="writer").wait(HANGS_S)
    other = make_state()
    receipt = engine.load_newest(other, step=1)
    assert receipt is not None and fingerprint(other) == prints[1]
    with pytest.raises(UsageError) as caught:
        engine.load_newest(other, step=7)
    assert str(caught.value) == (f"error: there is no checkpoint of step 7 in {engine.folder}\nhint: there are: 2, 1")


def test_old_ones_go_and_the_best_and_the_multiples_stay(start: Make) -> None:
    engine = start(keep=Keep(last=2, every=4, best="loss"))
    state = make_state()
    for step in range(1, 11):
        train_step(state)
        engine.save(state, step=step, metrics={"loss": 1.0 if step == 3 else 2.0}, wait="writer").wait(HANGS_S)
    engine.close(linger_s=30)
    assert [name.step for name in list_names(engine.folder)] == [10, 9, 8, 4, 3]
    assert (engine.folder / "latest").read_text() == "step-00000010\n"
    assert (engine.folder / "best").read_text() == "step-00000003\n"


def test_a_second_trainer_on_the_same_run_is_refused(start: Make, run: RunDir) -> None:
    first = start()
    state = make_state()
    assert first.load_newest(state) is None
    child = os.fork()
    if child == 0:  # another living process
        code = 1
        try:
            CheckpointEngine(run).load_newest({})
        except UsageError as problem:
            code = 0 if "is already writing checkpoints into this run" in str(problem) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.save(state, step=1).wait(HANGS_S)


def test_a_forked_child_saves_nothing_and_harms_nothing(start: Make) -> None:
    engine = start()
    state = make_state()
    engine.load_newest(state)
    child = os.fork()
    if child == 0:
        ticket = engine.save(state, step=9)
        engine.before_change()
        engine.close()
        os._exit(0 if ticket.why == "this is a forked child of the training process" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.save(state, step=1).wait(HANGS_S)
    assert list_names(engine.folder) == [Name(1)]


def test_a_folder_deleted_under_us_is_said_and_saving_continues(start: Make) -> None:
    import shutil

    engine = start()
    state = make_state()
    assert engine.save(state, step=1).wait(HANGS_S)
    wait_until(lambda: "verified" in kinds(engine.poll()), "the writer to read it back")
    # In one step: the writer may be writing a note into it at this moment.
    shutil.move(engine.folder, engine.folder.with_name("elsewhere"))
    assert engine.save(state, step=2).wait(HANGS_S)
    assert "folder_lost" in kinds(engine.poll())
    assert list_names(engine.folder) == [Name(2)]
    assert read_holder(engine.folder / LOCK).writer is not None


def test_without_memory_for_a_copy_it_saves_in_pieces_and_says_so(start: Make) -> None:
    engine = start(available_memory=lambda: 0)
    state = {
        "model": nn.Linear(5000, 6000),
        "odd": {"t": torch.randn(3000, 2000).t(), "z": torch.randn(7).to(torch.complex64)},
    }
    ticket = engine.save(state, step=1, overlap=True)
    assert ticket.wait(HANGS_S)
    assert engine._area.arena is not None and engine._area.arena.size_bytes == 64 << 20
    assert ticket.size_bytes > 100 << 20
    assert [event.text for event in engine.poll() if event.is_loud] == [
        "memory has no room for a copy of the state (137 MiB); training waits while a save is written"
    ]
    other = {
        "model": nn.Linear(5000, 6000),
        "odd": {"t": torch.zeros(2000, 3000), "z": torch.zeros(7, dtype=torch.complex64)},
    }
    engine.load_newest(other)
    assert fingerprint(other) == fingerprint(state)


def test_a_writer_that_dies_in_the_middle_of_pieces_loses_that_save_only(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = kill_at(3, "before", call="write", fired=str(tmp_path / "fired"))
    engine = start(available_memory=lambda: 0, writer_command=with_fault(monkeypatch, fault))
    state = {"model": nn.Linear(5000, 6000)}
    ticket = engine.save(state, step=1)
    assert not ticket.wait(HANGS_S) and ticket.why == "the writer was lost"
    assert engine.save(state, step=2).wait(HANGS_S)
    assert list_names(engine.folder) == [Name(2)]


def test_a_state_that_grows_gets_a_larger_arena(start: Make) -> None:
    engine = start()
    state = make_state()
    engine.prepare(state)
    assert engine.save(state, step=1).wait(HANGS_S)  # no optimizer state yet
    train_step(state)
    before = fingerprint(state)
    assert engine.save(state, step=2, wait="writer").wait(HANGS_S)
    other = make_state()
    engine.load_newest(other)
    assert fingerprint(other) == before


def test_the_writer_lets_an_outgrown_arena_go_before_the_next_save(start: Make) -> None:
    engine = start()
    assert engine.save({"w": torch.zeros(1000)}, step=1).wait(HANGS_S)
    maps = Path(f"/proc/{engine._link.writer.pid}/maps")
    arena = "jackline-checkpoint"

    def sizes() -> list[int]:
        ranges = [line.split()[0].split("-") for line in maps.read_text().splitlines() if arena in line]
        return [int(end, 16) - int(begin, 16) for begin, end in ranges]

    [small] = sizes()
    engine.prepare({"w": torch.zeros(100_000)})
    assert engine._area.arena is not None
    large = engine._area.arena.size_bytes
    assert large > small
    wait_until(lambda: sizes() == [large], "one arena, the new one")


def test_a_state_that_cannot_be_saved_is_refused_by_name_and_the_next_one_works(start: Make) -> None:
    from jackline.checkpoint.format.tree import CannotSave

    engine = start()
    state = make_state()
    with pytest.raises(CannotSave, match=r"counters\.bad cannot be saved: a 'object' has no state_dict"):
        engine.save({**state, "counters": {"bad": object()}}, step=1)
    assert engine.save(state, step=1).wait(HANGS_S)


@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_a_state_that_no_resume_could_read_is_refused_by_name_and_not_acknowledged(
    start: Make, monkeypatch: pytest.MonkeyPatch, is_in_pieces: bool
) -> None:
    """It was acknowledged, and every later start found no checkpoint that it could load."""
    from jackline.checkpoint.staging import handover

    monkeypatch.setattr(handover, "MAX_STATE_BYTES", 100_000)
    engine = start(available_memory=lambda: 0) if is_in_pieces else start()
    state = {"w": torch.zeros(20_000_000)} if is_in_pieces else make_state()
    ticket = engine.save({**state, "buffer": {"rewards": list(range(50_000))}}, step=1)
    assert not ticket.wait(HANGS_S)
    assert "not tensors take" in ticket.why and "the largest part is 'buffer' with" in ticket.why
    assert list_names(engine.folder) == []
    assert engine.save(state, step=2).wait(HANGS_S)


def test_frozen_parameters_are_named_by_their_hash_and_must_be_there_at_resume(start: Make) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
        model[0].requires_grad_(False)
        return {"model": model}

    engine = start(leave_out_frozen=True)
    state = make(0)
    ticket = engine.save(state, step=1, overlap=True)
    assert ticket.wait(HANGS_S) and ticket.size_bytes < 20_000
    again = make(0)
    with torch.no_grad():
        again["model"][1].weight.zero_()
    assert engine.load_newest(again) is not None
    assert fingerprint(again) == fingerprint(state)
    with pytest.raises(CannotResume) as caught:
        engine.load_newest(make(1))
    assert str(caught.value) == (
        "error: model.0.weight was frozen and left out of the checkpoint, and is not the same now\n"
        "hint: load the same frozen weights before resuming"
    )


def test_metrics_that_are_no_numbers_do_not_stop_a_save(start: Make) -> None:
    engine = start()
    ticket = engine.save(make_state(), step=1, metrics={"loss": float("nan"), "accuracy": 0.5})
    assert ticket.wait(HANGS_S)
    manifest = verify_checkpoint(engine.folder / "step-00000001")
    assert manifest.metrics == {"accuracy": 0.5}
    assert manifest.facts["metrics_not_finite"] == {"loss": "nan"}


def test_a_read_only_folder_is_reported_and_training_continues(run: RunDir, start: Make) -> None:
    import subprocess

    run.checkpoints.mkdir()
    if subprocess.run(["chattr", "+i", str(run.checkpoints)], capture_output=True).returncode:
        pytest.skip("chattr +i does not work here, and mode bits do not stop root")
    try:
        engine = start()
        state = make_state()
        with pytest.raises(UsageError, match="cannot be used: Operation not permitted"):
            engine.load_newest(state)
        ticket = engine.save(state, step=1)
        assert ticket.outcome == "failed" and "cannot be used" in ticket.why
        assert any("checkpoints are off" in event.text for event in engine.poll())
    finally:
        subprocess.run(["chattr", "-i", str(run.checkpoints)], check=True)


def test_what_would_be_lost_is_known(start: Make) -> None:
    engine = start()
    assert engine.bounds().text() == (
        "at risk: everything since the start; if the machine is lost, everything since the start"
    )
    engine.save(make_state(), step=1).wait(HANGS_S)
    engine.poll()
    text = engine.bounds().text()
    assert re.fullmatch(r"at risk: \d+\.\d s; if the machine is lost, everything since the start", text), text


def test_a_full_disk_stops_no_training_and_costs_no_older_checkpoint(run: RunDir, start: Make) -> None:
    from tests.places import Unavailable, small_disk

    run.checkpoints.mkdir()
    try:
        with small_disk(run.checkpoints, "110M"):
            engine = start(keep=Keep(last=2))
            state = {"model": nn.Linear(1500, 1500)}  # 9 MB; 64 MB are kept free
            outcomes = []
            for step in range(1, 9):
                ticket = engine.save(state, step=step, wait="writer")
                ticket.wait(HANGS_S)
                outcomes.append(ticket.outcome)
            assert outcomes == ["committed"] * 8  # older ones made room
            (run.checkpoints / "ballast").write_bytes(bytes(30 << 20))
            ticket = engine.save(state, step=9, wait="writer")
            assert not ticket.wait(HANGS_S) and ticket.why == "the disk is full"
            (loud,) = [event.text for event in engine.poll() if event.is_loud]
            assert re.fullmatch(
                r"step 9 could not be saved: the disk is full \(\S+ MiB needed, \S+ MiB free\); "
                r"training continues without this checkpoint",
                loud,
            ), loud
            assert len(list_names(run.checkpoints)) >= 2
            (run.checkpoints / "ballast").unlink()
            assert engine.save(state, step=10, wait="writer").wait(HANGS_S)
            engine.close(linger_s=30)
            assert [name.step for name in list_names(run.checkpoints)] == [10, 8]
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_checkpoints_on_another_device_than_the_run_are_as_good(run: RunDir, start: Make) -> None:
    import shutil
    import tempfile

    away = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        run.checkpoints.symlink_to(away)
        assert away.stat().st_dev != run.path.stat().st_dev
        engine = start()
        state = make_state()
        assert engine.save(state, step=1).wait(HANGS_S)
        other = make_state(seed=2)
        assert engine.load_newest(other) is not None and fingerprint(other) == fingerprint(state)
        engine.close()
    finally:
        shutil.rmtree(away)


def test_a_run_on_a_network_mount_commits_locally_and_comes_back_from_the_mount_alone(
    run: RunDir, start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount is played by a folder; what the engine is told about its file system is not."""
    import shutil

    from jackline.checkpoint import engine as module
    from jackline.checkpoint.place import away_from

    monkeypatch.setattr(module, "choose_place", lambda run: away_from(run, "fuse.drive"))
    engine = start(mirror_every_s=0.1)
    assert engine.folder != run.checkpoints
    assert "is on fuse.drive, so checkpoints are committed to" in engine.poll()[0].text
    state = make_state()
    assert engine.save(state, step=1).wait(HANGS_S)
    wait_until(lambda: "mirrored" in kinds(engine.poll()), "the copy on the mount")
    assert not list(run.checkpoints.glob(".tmp*")) and len(list(run.checkpoints.glob("step-00000001-*"))) == 1
    engine.close()
    shutil.rmtree(engine.folder)  # another machine with the same mount
    other = make_state(seed=2)
    receipt = start().load_newest(other)
    assert receipt is not None and fingerprint(other) == fingerprint(state)


def large_state() -> dict[str, Any]:
    """Large enough to be handed over while it is copied."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(6)))
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "n": 5}


def test_a_large_state_is_written_while_it_is_copied_and_is_exact(start: Make) -> None:
    engine = start()
    state = large_state()
    for step in (1, 2):
        state["model"](torch.randn(2, 1500)).square().sum().backward()
        engine.before_change()
        state["optim"].step()
        before = fingerprint(state)
        ticket = engine.save(state, step=step, overlap=True, wait="writer")
    engine.before_change()
    with torch.no_grad():
        state["model"][0].weight.zero_()
    assert ticket.wait(HANGS_S) and ticket.size_bytes > 100 << 20
    other = large_state()
    engine.load_newest(other)
    assert fingerprint(other) == before


@pytest.mark.parametrize("nth", [1, 4, 7, 9, 12, 16, 20])
def test_a_writer_killed_while_it_takes_a_large_state_costs_nothing(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    fired = tmp_path / "fired"
    engine = start(writer_command=with_fault(monkeypatch, kill_at(nth, "before", fired=str(fired))))
    state = large_state()
    before = fingerprint(state)
    ticket = engine.save(state, step=1, overlap=True)
    engine.before_change()
    assert ticket.wait(HANGS_S) and fired.exists()
    other = large_state()
    engine.load_newest(other)
    assert fingerprint(other) == before


def test_an_error_while_a_large_state_comes_in_fails_that_save_only(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(writer_command=with_fault(monkeypatch, fail_at("write", nth=3, with_errno=errno.ENOSPC)))
    state = large_state()
    ticket = engine.save(state, step=1, overlap=True)
    engine.before_change()
    assert not ticket.wait(HANGS_S) and ticket.why == "the disk is full"
    assert list_names(engine.folder) == []
    assert engine.save(state, step=2, overlap=True).wait(HANGS_S)


def test_a_torn_copy_of_a_large_state_is_cancelled_at_the_writer(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from jackline.checkpoint.staging.handover import HandOver

    gate, begun = threading.Event(), threading.Event()
    up_to = HandOver.up_to

    def slow(over: HandOver, address: int) -> None:
        up_to(over, address)
        begun.set()
        gate.wait(HANGS_S)

    engine = start()
    state = large_state()
    assert engine.save(state, step=1).wait(HANGS_S)
    monkeypatch.setattr(HandOver, "up_to", slow)
    ticket = engine.save(state, step=2, overlap=True)
    engine._pending = None  # a loop that forgets
    assert begun.wait(HANGS_S)
    with torch.no_grad():
        for tensor in state["model"].parameters():
            tensor.add_(1)
    gate.set()
    assert not ticket.wait(HANGS_S)
    assert list_names(engine.folder) == [Name(1)]
    assert engine.save(state, step=3, wait="writer").wait(HANGS_S)
    assert not list(engine.folder.glob(".tmp*"))


def test_a_disk_that_refuses_o_direct_after_all_is_written_through_the_cache(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = fail_at("write", nth=2, with_errno=errno.EINVAL)
    engine = start(is_direct=True, writer_command=with_fault(monkeypatch, fault))
    state = large_state()
    ticket = engine.save(state, step=1, overlap=True)
    engine.before_change()
    assert ticket.wait(HANGS_S)
    other = large_state()
    engine.load_newest(other)
    assert fingerprint(other) == fingerprint(state)


@needs_autogroups
def test_the_writer_steps_back_with_its_whole_session_and_the_loop_does_not(start: Make) -> None:
    def weight_of(pid: int) -> int:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])

    before = weight_of(os.getpid())
    engine = start()
    engine._link.wait_ready()
    assert weight_of(engine._link.writer.pid) == min(os.nice(0) + NICENESS, 19)
    assert weight_of(os.getpid()) == before


def test_a_step_that_is_saved_again_and_again_never_takes_the_name_of_an_older_save(start: Make) -> None:
    """Its first name becomes free when retention deletes it; a newer save of that name would count as the oldest."""
    engine, values = start(keep=Keep(last=2)), {"count": 0}
    for count in range(6):
        values["count"] = count
        assert engine.save({"values": values}, step=0, wait="durable").outcome == "committed"
        wait_until(lambda: "verified" in kinds(engine.poll()), "the writer to read it back")
    engine.close()
    found: dict[str, Any] = {"values": {}}
    assert start().load_newest(found) is not None
    assert found["values"]["count"] == 5

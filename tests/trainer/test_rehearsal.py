"""The rehearsal against the plan: what was measured is kept in the run, and a plan that was far off is made anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from jackline.errors import UsageError
from jackline.memory.plan.choose import Room
from jackline.memory.plan.gpus import find_gpu
from jackline.rundir.layout import RunDir
from jackline.rundir.records.memory import read_memory
from jackline.trainer.build import build_language
from jackline.trainer.config import resolve
from jackline.trainer.language import LanguageTask
from jackline.trainer.planning.plan import Chosen, plan_on
from jackline.trainer.planning.rehearsal import _remembered, rehearse_step, remember
from jackline.trainer.report.console import Console
from jackline.trainer.validate.validation import Validation

pytestmark = pytest.mark.xdist_group("rehearsal")  # one task for all of them


@pytest.fixture(scope="module")
def task(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageTask]:
    """Rehearsals leave no trace in it."""
    words = ["--quick", "seq_len=16", "batch_size=8", "max_steps=3", f"data={corpus / 'text'}"]
    made = build_language(
        resolve("demo", [*words, f"data_dir={corpus / 'data'}"]).config, Console(), tmp_path_factory.mktemp("run")
    )
    yield made
    made.close()


def _planned(task: LanguageTask, room: Room) -> LanguageTask:
    """As if this were a GPU with that much memory."""
    plan_again = partial(plan_on, task.config, task.shape, task.learner.precision, find_gpu("T4"))
    made = plan_again(room)
    return replace(task, chosen=Chosen(made.micro_batch, made.accumulation, "planned", made, plan_again))


def test_what_was_measured_is_kept_and_a_plan_far_off_is_made_anew(
    task: LanguageTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Twice of what is needed was predicted, so the first plan takes slices of a batch that fits whole.
    roomy = _planned(task, Room(1 << 30))
    needed = roomy.chosen.made.prediction.peak_reserved_bytes  # type: ignore[union-attr]
    cautious = _planned(task, Room(needed, correction=1.5))
    assert cautious.chosen.micro_batch < roomy.chosen.micro_batch == 8
    made = replace(cautious.chosen.made, room=Room(1 << 30), prediction=_doubled(cautious))  # type: ignore[arg-type]

    planned = replace(cautious, chosen=replace(cautious.chosen, made=made))
    found = rehearse_step(planned, Console(), RunDir(tmp_path))
    remember(RunDir(tmp_path), planned, found)

    assert found.micro_batch == 8
    said = capsys.readouterr().out
    assert "of what was predicted: planned anew, micro-batch 8 (fits)" in said
    assert "one step at micro-batch 8, measured and undone" in said
    stored = read_memory(RunDir(tmp_path)).usable_correction
    assert stored is not None
    assert stored < 0.97


def _doubled(task: LanguageTask) -> object:
    prediction = task.chosen.made.prediction  # type: ignore[union-attr]
    return replace(prediction, peak_allocated_bytes=2 * prediction.peak_allocated_bytes)


def test_a_plan_that_holds_is_kept(task: LanguageTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = _planned(task, Room(1 << 30))
    measured = rehearse_step(replace(task, chosen=replace(planned.chosen, made=None)), Console(), None)
    capsys.readouterr()

    found = rehearse_step(planned, Console(), RunDir(tmp_path))
    remember(RunDir(tmp_path), planned, found)

    assert found.micro_batch == measured.micro_batch == 8
    correction = read_memory(RunDir(tmp_path)).usable_correction
    assert correction is not None
    said = capsys.readouterr().out
    assert ("planned anew" in said) == (abs(correction - 1) > 0.03)


def test_a_later_attempt_on_the_same_device_does_not_rehearse_again(
    task: LanguageTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    first = rehearse_step(task, Console(), run)
    remember(run, task, first)
    capsys.readouterr()

    assert rehearse_step(task, Console(), run) == first
    assert "measured earlier on the same device" in capsys.readouterr().out
    smaller = replace(task, config=replace(task.config, micro_batch=4), chosen=Chosen(4, 2, "as asked"))
    assert rehearse_step(smaller, Console(), run).micro_batch == 4  # what a person asks for later is not overruled
    elsewhere = replace(task, learner=replace(task.learner, device_name="NVIDIA T4"))
    assert rehearse_step(elsewhere, Console(), run).micro_batch == first.micro_batch
    assert "one step at micro-batch 8, measured and undone" in capsys.readouterr().out


def test_a_torn_memory_file_means_a_rehearsal(task: LanguageTask, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("", "[]", '{"rehearsed": 3}', '{"rehearsed": {"device": "X", "micro_batch": "8"}}'):
        run.memory_file.write_text(text.replace('"X"', f'"{task.learner.device_name}"'))
        assert _remembered(run, task) is None, text


def test_masks_without_a_validation_window_are_refused_before_step_1(corpus: Path, tmp_path: Path) -> None:
    words = ["--quick", "seq_len=30000", "batch_size=1", f"data={corpus / 'text'}", f"data_dir={corpus / 'data'}"]

    with pytest.raises(UsageError) as caught:
        build_language(resolve("sparsae", words).config, Console(), tmp_path)

    assert str(caught.value) == (
        "error: masks are judged on validation data, and it has no window of 30000 tokens\n"
        "hint: more data, a larger val_fraction, a shorter seq_len, or split_by=lines for long text files"
    )


def test_a_validation_that_nobody_can_do_is_not_passed_over_in_silence(
    task: LanguageTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = Validation(task, None, Console())
    request = tmp_path / "validation-request"
    request.touch()

    validation.after_step(SimpleNamespace(step=3), None, 3, request)  # type: ignore[arg-type]

    said = capsys.readouterr().out
    assert said.endswith("[eval] a full validation was asked for, and this run has no validation data\n")
    assert not request.exists()

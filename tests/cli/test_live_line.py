"""The line that is redrawn in place: everything that matters, in as many columns as there are."""

from __future__ import annotations

from typing import Any

import pytest

from jackline.cli.view.live_line import Line, live_line
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import SupervisorRecord

NOW_S = 1_794_000_000.0
GIB = 2**30
STATE: dict[str, Any] = {
    "at_s": NOW_S,
    "started_at_s": NOW_S - 3600,
    "attempt": 1,
    "cpu_cores": 1.04,
    "now": {"what": "in the forward pass", "file": "/home/me/train.py", "line": 41, "source": "y = model(x)"},
    "memory": {"own_bytes": int(3.2 * GIB), "used_bytes": 5 * GIB, "limit_bytes": 24 * GIB},
}
SESSION: dict[str, Any] = {
    "at_s": NOW_S,
    "attempt": 1,
    "phase": "train",
    "done": 1230,
    "total": 10000,
    "unit": "steps",
    "rate_per_s": 5.21,
    "eta_s": 1683.0,
    "step": 1230,
    "metrics": {"lr": 3e-4, "val_loss": 2.6, "loss": 2.31416, "accuracy": 0.6212},
    "last_checkpoint": {"at_s": NOW_S - 41, "step": 1200, "path": "x"},
    "loss_bounds": {"process_s": 41.0},
}


def line(
    state: dict[str, Any] | None = None, session: dict[str, Any] | None = None, columns: int | None = 68, **how: Any
) -> Line:
    return live_line(
        SupervisorRecord.from_json({**STATE, **(state or {})}),
        SessionRecord.from_json({} if session is None else {**SESSION, **session}),
        NOW_S,
        columns=columns,
        **how,
    )


def test_eighty_columns_hold_step_loss_rate_time_left_age_of_the_save_and_memory() -> None:
    found = line(session={})
    assert found.text == "step  1,230/10,000  loss 2.314  5.2/s  eta 28m  saved 41s  ram 3.2G"
    assert found.tone == "good"
    assert line(session={"done": 123_456, "total": 1_000_000}).text == (
        "step  123k/1.00M  loss 2.314  5.2/s  eta 28m  saved 41s  ram 3.2G"
    )
    assert line(session={"done": 52, "total": 200}).text == (
        "step  52/200   26%  loss 2.314  5.2/s  eta 28m  saved 41s  ram 3.2G"
    )


def test_a_wider_terminal_has_more_and_a_pipe_has_everything() -> None:
    everything = line(session={}, columns=None).text
    assert everything == (
        "step  1,230/10,000   12%  loss 2.314  val_loss 2.600  accuracy 0.6212  lr 3.0e-04  5.2/s  eta 28m"
        "  saved 41s ago  ram 3.2G"
    )
    parts = everything.replace("step  ", "step ").split("  ")
    for columns in range(20, 120):
        shown = line(session={}, columns=columns).text
        assert len(shown) <= columns
        if columns > 30:
            known = [part.removesuffix(" ago").strip() for part in parts]
            found = [part.strip().removesuffix(" ago") for part in shown.replace("step  ", "step ").split("  ")]
            assert [part for part in known if part in found] == found


def test_numbers_keep_their_place_while_they_grow() -> None:
    at = [line(session={"done": done}, columns=120).text.index("loss") for done in (1, 999, 1230, 9999)]
    assert len(set(at)) == 1


def test_an_epoch_of_the_own_loop_and_its_total_come_from_epochs_times_batches() -> None:
    place = {"epoch": 2, "epochs": 5, "batch": 12, "num_batches": 40}
    session = {"done": 52, "total": None, "eta_s": None, "rate_per_s": 4.0, "place": place, "metrics": {"loss": 0.5}}
    assert line(session=session, columns=200).text == (
        "step  52/200   26%  epoch 2/5  loss 0.5000  4.0/s  eta 37s  saved 41s ago  ram 3.2G"
    )
    # Two batches make a step: half as many steps.
    assert line(session={**session, "done": 26}, columns=200).text.startswith("step  26/100   26%  epoch 2/5")


def test_what_a_script_prints_is_shown_without_attach() -> None:
    state = {
        "progress": {
            "phase": "", "done": 120, "total": 1000, "unit": "steps", "rate_per_s": 2.0, "eta_s": 440.0,
            "source": "line", "of": "run", "at_s": NOW_S - 40,
        },
        "printed": [{"name": "loss", "value": 2.31, "at_s": NOW_S}, {"name": "acc", "value": 0.4, "at_s": NOW_S}],
    }  # fmt: skip
    assert (
        line(state, columns=200).text == "step   120/1,000   12%  loss 2.310  acc 0.4000  2.0/s  eta 6m40s  ram 3.2G"
    )


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ({"done": 3, "total": 8, "unit": "epochs", "source": "line", "epoch": 3, "epochs": 8}, "epoch 3/8   38%"),
        ({"done": 1.7, "total": 4, "unit": "it", "phase": "Epochs", "source": "bar"}, "epoch 1.7/4   42%"),
        ({"done": 32, "total": 100, "unit": "%", "source": "bar"}, "32%"),
        ({"done": 150, "total": 300, "unit": "%", "source": "bar", "epoch": 2, "epochs": 3}, "50%  epoch 2/3"),
        ({"done": 32, "total": 100, "unit": "%", "phase": "Fetching", "source": "bar"}, "Fetching  32%"),
        ({"done": 0, "unit": "batches", "source": "line", "epoch": 1}, "batch 0  epoch 1"),
        ({"done": 40, "unit": "episodes", "source": "line"}, "episode 40"),
        ({"done": 5, "total": 9, "unit": "iterations", "source": "line"}, "iteration 5/9   56%"),
        ({"done": 2048, "unit": "total_timesteps", "source": "line"}, "step 2,048"),
    ],
)
def test_what_is_counted_is_named_once_and_in_the_singular(progress: dict[str, Any], words: str) -> None:
    assert line({"progress": {"phase": "", **progress}}, columns=200).text == f"{words}  ram 3.2G"


def test_the_time_left_of_an_epoch_is_not_called_the_runs() -> None:
    progress = {"done": 3, "total": 10, "unit": "it", "eta_s": 7.0, "source": "bar", "of": "epoch", "epoch": 2}
    assert line({"progress": progress}, columns=200).text == ("step  3/10  epoch 2  eta 7.0s of this epoch  ram 3.2G")


@pytest.mark.parametrize(("waited_s", "words"), [(1.0, "eta 6.0s  "), (7.5, "eta <1s  "), (60.0, "")])
def test_an_unfinished_run_never_needs_zero_seconds(waited_s: float, words: str) -> None:
    progress = {"done": 950, "total": 1000, "unit": "steps", "eta_s": 7.0, "source": "line", "at_s": NOW_S - waited_s}
    found = line({"progress": progress}, columns=200).text
    assert words in found and ("eta" in found) == bool(words)


def test_a_session_of_an_earlier_attempt_says_nothing() -> None:
    found = line({"attempt": 2}, session={})
    assert "loss" not in found.text
    assert found.tone == "dim"


def test_before_anything_is_counted_it_says_what_is_going_on() -> None:
    assert line(columns=68).text == "1h00m  in the forward pass  train.py:41 `y = model(x)`  cpu 1.0"
    assert line(columns=40).text == "1h00m  in the forward pass  cpu 1.0"
    assert line(columns=None).text.startswith("1 h  in the forward pass  train.py:41 `y = model(x)`  cpu 1.0  ram")


def test_a_long_description_leaves_room_for_the_time_and_the_line() -> None:
    """Without the time, which changes, the line would stand still for minutes."""
    waits = {**STATE["now"], "what": f"waiting for a file lock (/scratch/{'folder/' * 9}cache.lock)"}
    assert line({"now": waits}).text == "1h00m  waiting for a file lock  train.py:41 `y = model(x)`  cpu 1.0"
    assert line({"now": {**waits, "what": "x" * 79}}, columns=30).text == f"1h00m  {'x' * 20}..."


def test_a_phase_told_by_our_protocol_is_shown_as_it_is() -> None:
    progress = {"phase": "tokenising, 40 %", "done": 0, "source": "protocol"}
    assert line({"progress": progress}, columns=68).text.startswith("tokenising, 40 %  ")


def test_a_count_that_stands_still_is_shown_with_where_it_is() -> None:
    assert "train.py:41" not in line(session={}, columns=200, still_s=2.0).text
    assert "in the forward pass  train.py:41" in line(session={}, columns=200, still_s=6.0).text
    assert "backward  train.py:41" in line(session={"doing": "backward"}, columns=200, still_s=6.0).text


@pytest.mark.parametrize(
    ("verdict", "begins", "tone"),
    [
        ({"kind": "STUCK", "for_s": 720}, "STUCK for 12 min  step  1,230/10,000", "bad"),
        ({"kind": "SUSPECT", "for_s": 125}, "SUSPECT for 2 min 5 s  step  1,230/10,000", "warn"),
        ({"kind": "PAUSED", "for_s": 60, "text": "paused (SIGSTOP): pid 3"}, "paused (SIGSTOP) since ", "warn"),
        ({"kind": "BUSY", "for_s": 60}, "step  1,230/10,000", "good"),
    ],
)
def test_a_colour_and_the_first_words_say_whether_something_is_wrong(
    verdict: dict[str, Any], begins: str, tone: str
) -> None:
    found = line({"verdict": verdict}, session={})
    assert found.text.startswith(begins)
    assert (found.tone, len(found.text) <= 68) == (tone, True)


def test_what_stands_still_has_neither_pace_nor_time_left() -> None:
    moving = line(session={}, columns=200).text
    stuck = line({"verdict": {"kind": "STUCK", "for_s": 29}}, session={}, columns=200).text
    assert "eta " in moving and "/s" in moving and "eta " not in stuck and "/s" not in stuck


def test_what_is_at_risk_is_said_only_when_it_is_unusually_much() -> None:
    assert "at risk" not in line(session={}, columns=200).text
    late = {"loss_bounds": {"process_s": 2460.0}, "last_checkpoint": {"at_s": NOW_S - 2460, "step": 1, "path": "x"}}
    assert "at risk: 41m" in line(session=late).text


def test_memory_that_will_not_do_is_said_early() -> None:
    memory = {**STATE["memory"], "used_bytes": 23 * GIB}
    assert "ram 23.0G of 24.0G" in line({"memory": memory}, session={}, columns=120).text
    assert "memory full in 50s" in line({"memory": {**memory, "seconds_to_limit": 50.0}}, session={}).text


def test_a_gpu_is_shown_with_its_memory_and_its_use() -> None:
    gpu = [{"index": 0, "used_bytes": 60 * GIB, "total_bytes": 80 * GIB, "utilisation_percent": 93}]
    assert "gpu 60.0G/80.0G 93%" in line({"gpu": gpu}, session={}, columns=108).text


def test_a_hostile_name_is_shown_without_its_escapes() -> None:
    found = line(session={"metrics": {"loss\x1b[31m\u202e": 1.0}}, columns=None)
    assert "\x1b" not in found.text and "\u202e" not in found.text


def test_the_time_limit_comes_first_where_the_run_does_not_fit_and_last_where_it_does() -> None:
    def limited(left_s: float, **more: Any) -> str:
        limit = {"source": "Slurm", "stops_at_s": NOW_S + left_s, "ends_at_s": NOW_S + left_s + 120}
        return line(state={"time_limit": limit}, session=more, columns=100).text

    short = limited(1200.0)
    assert "eta 28m  limit 20m: too short  saved 41s" in short, short
    assert "limit 1h23m" in limited(5000.0)
    assert "limit" not in line(state={"time_limit": {"source": "Slurm", "stops_at_s": NOW_S + 5000}}, session={}).text
    assert "stops in 5m00s" in limited(300.0, eta_s=None)

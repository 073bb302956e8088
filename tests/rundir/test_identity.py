"""Is this command a new run, a live one, a dead one, or a clash?"""

from __future__ import annotations

import pytest

from jackline.rundir.identity import (
    AlreadyFinished,
    Clash,
    Create,
    Elsewhere,
    Existing,
    Resume,
    Start,
    State,
    Watch,
    compare_settings,
    decide_start,
    default_name,
    numbered_name,
)

SETTINGS = {"argv": ["python", "train.py", "--lr", "1"], "cwd": "/home/me"}
CHANGED = {"argv": ["python", "train.py", "--lr", "2"], "cwd": "/home/me"}


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        ("python train.py --lr 1", "train"),
        ("python3.11 -u src/deep/train.py", "train"),
        ("python -m pkg.train --config conf.py", "train"),
        ("torchrun --nproc-per-node 2 train.py", "train"),
        ("torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py --lr 3", "train"),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", "train"),
        ("accelerate launch --num_processes 2 finetune.py", "finetune"),
        ("env CUDA_VISIBLE_DEVICES=0 python train.py", "train"),
        ("timeout 60 bash job.sh", "job"),
        ("uv run train.py", "train"),
        ("./my-trainer --config conf.py", "my-trainer"),
        ("bash -c exit", "bash"),
        ("python -", "python"),
        ("python -c pass", "python"),
        ("sleep 600", "sleep"),
        ("./ünïcode.py", "n-code"),
        ("python", "python"),
        ("", "run"),
    ],
)
def test_the_name_begins_with_the_word_a_person_would_use(command: str, stem: str) -> None:
    name = default_name(command.split(), SETTINGS)
    assert name.rsplit("-", 1)[0] == stem


def test_the_same_command_always_has_the_same_name_and_another_has_another() -> None:
    first = default_name(["python", "train.py"], SETTINGS)
    assert first == default_name(["python", "train.py"], dict(reversed(SETTINGS.items())))
    assert first != default_name(["python", "train.py"], CHANGED)
    assert len(first) == len("train-") + 6


def start(
    existing: Existing | None, wanted: dict[str, object] = SETTINGS, *, is_new: bool = False, ok: bool = False
) -> Start:
    return decide_start(wanted, existing, name="train", is_new=is_new, accepts_changes=ok)


def test_an_unused_name_is_created() -> None:
    assert start(None) == Create("train")


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        ("empty", Create("train")),
        ("alive", Watch("train")),
        ("unwatched", Watch("train")),
        ("stopped", Resume("train")),
        ("dead", Resume("train")),
        ("finished", AlreadyFinished("train")),
        ("elsewhere", Elsewhere("train")),
    ],
)
def test_the_same_command_again_depends_on_how_the_run_is(state: State, answer: Start) -> None:
    assert start(Existing("train", state, SETTINGS)) == answer


@pytest.mark.parametrize("state", ["alive", "unwatched", "stopped", "dead", "finished", "elsewhere"])
def test_a_new_run_is_always_created_when_asked_for(state: State) -> None:
    assert start(Existing("train", state, SETTINGS), is_new=True) == Create("train")


@pytest.mark.parametrize("state", ["stopped", "dead", "finished", "elsewhere"])
def test_changed_settings_clash_and_show_the_difference(state: State) -> None:
    lines = ("argv: python train.py --lr 1 -> python train.py --lr 2",)
    assert start(Existing("train", state, SETTINGS), CHANGED) == Clash("train", False, lines)


@pytest.mark.parametrize("state", ["stopped", "dead", "finished"])
def test_changed_settings_may_be_accepted(state: State) -> None:
    assert start(Existing("train", state, SETTINGS), CHANGED, ok=True) == Resume(
        "train", ("argv: python train.py --lr 1 -> python train.py --lr 2",)
    )


@pytest.mark.parametrize("state", ["alive", "unwatched"])
def test_a_live_run_never_changes_its_settings(state: State) -> None:
    answer = start(Existing("train", state, SETTINGS), CHANGED, ok=True)
    assert isinstance(answer, Clash) and answer.is_alive


def test_settings_compare_as_json_and_name_what_is_missing() -> None:
    assert compare_settings({"a": (1, 2)}, {"a": [1, 2]}) == ()
    assert compare_settings({"a": 1, "b": 2}, {"a": 1, "c": "x"}) == ("b: 2 -> (not set)", "c: (not set) -> x")


def test_a_taken_name_gets_the_first_free_number() -> None:
    assert numbered_name("train", []) == "train"
    assert numbered_name("train", ["train", "train-2", "train-4"]) == "train-3"


def test_a_recipe_is_the_same_run_in_every_folder_unless_it_reads_files_from_there() -> None:
    recipe = {"recipe": "demo", "lr": 0.1}
    assert compare_settings({**recipe, "cwd": "/a"}, {**recipe, "cwd": "/b"}) == ()
    here = {**recipe, "data": "corpus/*.txt", "cwd": "/a", "files_in": "/a"}
    there = {**here, "cwd": "/b", "files_in": "/b"}
    assert compare_settings(here, there) == ("files_in: /a -> /b",)
    old = {name: value for name, value in here.items() if name != "files_in"}
    assert compare_settings(old, here) == ()
    assert compare_settings(old, there) == ("files_in: /a -> /b",)

"""Planted differences are named, and nothing else is."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackline.cli.pages.diff import command
from jackline.machine.procfs import list_packages, package_folders
from jackline.review.compare import differences, part
from jackline.review.facts import parse_command, read_facts
from jackline.rundir.layout import RunDir
from jackline.rundir.records.surroundings import SurroundingsRecord, write_surroundings

GOLDEN = Path(__file__).parents[1] / "golden" / "format1-finished"


def make_run(runs: Path, name: str, values: dict[int, float] | None = None, **changes: Any) -> RunDir:
    """A finished run whose run.json has `changes`, with a loss for each step of `values`."""
    run = RunDir(runs / name)
    shutil.copytree(GOLDEN, run.path)
    contents = {**json.loads(run.run_file.read_text()), "name": name, **changes}
    run.run_file.write_text(json.dumps(contents))
    write_surroundings(run.attempt(1), SurroundingsRecord(1.0, {"torch": "2.13.0", "numpy": "2.4.0"}))
    run.config_file.write_text("lr: 0.001\nmodel:\n  layers: 4\n")
    with open(run.metrics(), "w") as file:
        for step, value in (values or {}).items():
            file.write(json.dumps({"step": step, "at_s": 1.0, "loss": value}) + "\n")
    return run


def names_of(one: RunDir, other: RunDir) -> set[str]:
    return {f"{each.section}: {each.name}" for each in differences(read_facts(one), read_facts(other))}


def test_two_equal_runs_have_no_difference(tmp_path: Path) -> None:
    assert names_of(make_run(tmp_path, "a"), make_run(tmp_path, "b")) == set()


def test_two_runs_of_a_recipe_do_not_differ_in_their_own_folders(tmp_path: Path) -> None:
    def start(name: str, *settings: str) -> RunDir:
        return make_run(tmp_path, name, argv=["python", "-m", "jackline.trainer", f"/r/{name}", "demo", *settings])

    assert names_of(start("a", "--quick"), start("b", "--quick")) == set()
    assert names_of(start("c", "lr=0.1"), start("d", "lr=0.2")) == {"command: lr"}
    assert names_of(
        start("e"), make_run(tmp_path, "f", argv=["python", "-m", "jackline.trainer", "/r/f", "m7c"])
    ) == {"command: word 1"}


def test_each_planted_difference_is_named_and_no_other(tmp_path: Path) -> None:
    base = make_run(tmp_path, "base")
    argv = ["python", "train.py", "--lr", "0.002"]
    assert names_of(base, make_run(tmp_path, "lr", argv=argv)) == {"command: --lr"}
    git = {"commit": "f" * 40, "is_dirty": False}
    assert names_of(base, make_run(tmp_path, "code", git=git)) == {"code: commit"}
    machine = {"system": "Linux-6.1-x86_64", "num_cpus": 16}
    assert names_of(base, make_run(tmp_path, "machine", machine=machine)) == {"machine: num_cpus"}
    config = make_run(tmp_path, "config")
    config.config_file.write_text("lr: 0.001\nmodel:\n  layers: 5\n")
    assert names_of(base, config) == {"settings: model.layers"}
    packages = make_run(tmp_path, "packages")
    write_surroundings(packages.attempt(1), SurroundingsRecord(1.0, {"torch": "2.11.0", "numpy": "2.4.0"}))
    assert names_of(base, packages) == {"packages: torch"}


def test_a_section_that_one_run_did_not_record_is_not_a_difference(tmp_path: Path) -> None:
    older = make_run(tmp_path, "older")
    older.attempt(1).surroundings_file.unlink()
    older.config_file.unlink()
    assert "settings" not in {name.partition(":")[0] for name in names_of(make_run(tmp_path, "new"), older)}


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 50_000, "- " * 60_000, "a: &a [x]\nb: *a\n", "\x00", "? " * 9]
)
def test_a_hostile_config_has_no_settings_and_takes_no_time(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, "hostile")
    run.config_file.write_text(text)
    began_s = time.process_time()
    assert len(read_facts(run)["settings"]) <= 1
    print(f"{time.process_time() - began_s:.3f} s of CPU")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ("/usr/bin/python3", "train.py", "--lr", "3e-4"),
            {"word 0": "python3", "word 1": "train.py", "--lr": "3e-4"},
        ),
        (("x", "--a=1", "--flag", "--b_c", "-2"), {"word 0": "x", "--a": "1", "--flag": "on", "--b-c": "-2"}),
        (("x", "model.lr=3", "data"), {"word 0": "x", "model.lr": "3", "word 1": "data"}),
    ],
)
def test_options_are_compared_by_name(argv: tuple[str, ...], expected: dict[str, str]) -> None:
    assert parse_command(argv) == expected


def losses(seed: int, num: int = 400, noise: float = 0.0) -> dict[float, float]:
    rng = random.Random(seed)
    return {float(step): 3.0 / (1 + step / 50) + noise * rng.gauss(0, 1) for step in range(num)}


def test_equal_numbers_are_said_to_be_equal_to_the_bit() -> None:
    found = part("loss", losses(0), losses(0))
    assert (found.first_unequal, found.parts_at, found.equal_until) == (None, None, 399)


def test_the_first_unequal_step_and_the_first_that_matters_are_told_apart() -> None:
    other = {
        step: value * (1 + 1e-9 if step >= 100 else 1.0) + (0.5 if step >= 300 else 0.0)
        for step, value in losses(0).items()
    }
    found = part("loss", losses(0), other)
    assert (found.equal_until, found.first_unequal, found.parts_at) == (99, 100, 300)


def test_they_do_not_part_while_they_are_equal() -> None:
    """What is compared are means of windows, and one may begin before the difference does."""
    other = {step: value + (0.5 if step >= 33 else 0.0) for step, value in losses(0).items()}
    found = part("loss", losses(0), other)
    assert (found.equal_until, found.first_unequal, found.parts_at) == (32, 33, 33)


def test_replicates_tell_noise_from_a_difference() -> None:
    one, twin = losses(1, noise=0.02), losses(2, noise=0.02)
    same = part("loss", one, losses(3, noise=0.02), [twin])
    assert same.parts_at is None
    worse = {step: value + (0.3 if step >= 200 else 0.0) for step, value in losses(3, noise=0.02).items()}
    assert part("loss", one, worse, [twin]).parts_at == 200


def test_a_loss_that_is_not_a_number_parts_at_once() -> None:
    other = {step: math.nan if step >= 8 else value for step, value in losses(0, 20).items()}
    assert part("loss", losses(0, 20), other).parts_at == 8
    assert part("loss", other, other).first_unequal is None


def test_the_command_says_it_in_words_and_as_json(tmp_path: Path) -> None:
    steps = {step: 2.0 - step / 100 for step in range(50)}
    make_run(tmp_path, "a", steps)
    make_run(tmp_path, "b", {**steps, 40: 9.0, 49: 7.0}, argv=["python", "train.py", "--lr", "0.002"])
    done = CliRunner().invoke(command, ["a", "b", "--runs-dir", str(tmp_path)], catch_exceptions=False)
    assert "  command\n    --lr: 0.001 -> 0.002\n" in done.output
    assert "  loss: first unequal at step 40, equal to the bit until 39\n" in done.output
    assert "    apart by more than one percent from step 49 on\n" in done.output
    done = CliRunner().invoke(command, ["a", "b", "--json", "--runs-dir", str(tmp_path)], catch_exceptions=False)
    told = json.loads(done.output)
    assert [each["name"] for each in told["differences"]] == ["--lr"]
    assert told["metric"]["first_unequal"] == 40


def test_packages_are_read_from_what_a_process_has_mapped(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    for name in (
        "torch-2.13.0+cpu.dist-info",
        "My_Pkg-1.2.dist-info",
        "old-0.1-py3.11.egg-info",
        "nonsense",
        "x.dist-info",
    ):
        (folder / name).mkdir(parents=True)
    assert list_packages([str(folder), str(tmp_path / "gone")]) == {
        "my-pkg": "1.2",
        "old": "0.1",
        "torch": "2.13.0+cpu",
    }
    assert package_folders([2**22 + 7]) == []

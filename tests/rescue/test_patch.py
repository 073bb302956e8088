"""Where the lines of `jackline rescue --load` go in scripts of several shapes, and what their loops begin with."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jackline.cli.rescue.patch import choose_place, make_patch
from jackline.cli.rescue.spots import continued
from jackline.rundir.records.rescue import RescueRecord
from tests.deadline import HANGS_S

PARTS = (
    {"key": "model", "kind": "module"},
    {"key": "opt", "kind": "optimizer"},
    {"key": "sched", "kind": "scheduler"},
)


def _frame(function: str, line: int, values: dict[str, Any] | None = None, **names: str) -> dict[str, Any]:
    return {"function": function, "line": line, "names": names, "values": values or {}}


def _patched(folder: Path, source: str, *frames: dict[str, Any]) -> list[str]:
    """The lines of the patch that are new or gone. `frames`: the innermost first."""
    (folder / "train.py").write_text(source, newline="")
    places = tuple({"file": str(folder / "train.py"), **frame} for frame in frames)
    place = choose_place(RescueRecord(parts=PARTS, places=places))
    patch = make_patch(place, ["load()", *(f"{name} = {value!r}" for name, value in place.carried.items())])
    (folder / "it.patch").write_text(patch, newline="")
    line = ["patch", "--binary", "-p1", "-d", "/", "-i", str(folder / "it.patch")]
    subprocess.run(line, check=True, capture_output=True, timeout=HANGS_S)
    ast.parse((folder / "train.py").read_text())
    return [text for text in patch.split("\n") if text[:1] in ("+", "-")][2:]


def test_lines_go_before_the_outermost_loop_and_the_epoch_continues(tmp_path: Path) -> None:
    source = "def fit():\n    a = 1\n    for epoch in range(90):\n        for b in data:\n            step()\n"
    changed = _patched(tmp_path, source, _frame("fit", 5, {"epoch": 7}, model="model"))
    assert changed == ["-    for epoch in range(90):", "+    load()", "+    for epoch in range(7, 90):"]


def test_a_function_that_trains_one_epoch_gets_no_lines_its_caller_does(tmp_path: Path) -> None:
    """In the function they would load the state again in every epoch."""
    source = (
        "def train(model, opt, epoch):\n    for batch in data:\n        opt.step()\n"
        "def main():\n    for epoch in range(1, n + 1):\n        train(model, opt, epoch)\n        sched.step()\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    inner = _frame("train", 3, {"epoch": 3}, model="model", opt="opt")
    outer = _frame("main", 6, {"epoch": 3}, model="model", opt="opt", sched="sched")
    changed = _patched(tmp_path, source, inner, outer, _frame("<module>", 9))
    assert changed == ["-    for epoch in range(1, n + 1):", "+    load()", "+    for epoch in range(3, n + 1):"]


@pytest.mark.parametrize(
    ("reached", "known", "begins"),
    [(1, {"args.epochs": 40}, 1), (40, {"args.epochs": 40}, 41), (7, {}, 8)],
)
def test_a_loop_that_was_left_by_ctrl_c_begins_the_interrupted_epoch_again(
    reached: int, known: dict[str, Any], begins: int, tmp_path: Path
) -> None:
    """As in pytorch/examples' word_language_model, which catches Ctrl-C and then fails. One that ran to its end does
    not train again."""
    source = (
        "try:\n    for epoch in range(1, args.epochs + 1):\n        opt.step()\n"
        "except KeyboardInterrupt:\n    pass\nload_best()\n"
    )
    _patched(tmp_path, source, _frame("<module>", 6, {"epoch": reached, **known}, model="model", opt="opt"))
    assert f"    load()\n    for epoch in range({begins}, args.epochs + 1):" in (tmp_path / "train.py").read_text()


def test_numbers_that_a_loop_carries_continue_and_times_do_not(tmp_path: Path) -> None:
    source = (
        "import time\nstep, best = 0, 1e9\nt0 = time.time()\nself = make()\nwhile True:\n    t1 = time.time()\n"
        "    dt = t1 - t0\n    t0 = t1\n    loss = opt.step()\n    best = min(best, loss)\n    self.seen += 1\n"
        "    step += 1\n    if step > 100:\n        break\n"
    )
    values = {"step": 41, "best": 0.5, "t0": 9.5, "t1": 9.5, "dt": 1.0, "loss": 2.0, "self.seen": 8, "self.size": 3}
    changed = _patched(tmp_path, source, _frame("<module>", 9, values, model="model", opt="opt"))
    assert changed == ["+load()", "+best = 0.5", "+self.seen = 8", "+step = 41"]


def test_a_model_that_is_made_in_every_fold_is_loaded_once_in_the_fold_that_was_reached(tmp_path: Path) -> None:
    fold = "    model = Net()\n    opt = SGD(model)\n    for epoch in range(9):\n        opt.step()\n"
    source = f"for fold in range(5):\n{fold}"
    changed = _patched(tmp_path, source, _frame("<module>", 5, {"fold": 2, "epoch": 0}, model="model", opt="opt"))
    assert changed == [
        "-for fold in range(5):",
        "+for fold in range(2, 5):",
        '+    if "rescue_is_loaded" not in globals():',
        '+        globals()["rescue_is_loaded"] = True',
        "+        load()",
    ]


def test_a_crash_after_the_loop_does_not_train_again(tmp_path: Path) -> None:
    source = (
        "def main():\n    for p in model.parameters():\n        p.grad = None\n    for epoch in range(9):\n"
        "        train(model, opt)\n    evaluate(model)\n"
    )
    inner = {**_frame("evaluate", 1, {}, model="net"), "file": ""}
    changed = _patched(tmp_path, source, inner, _frame("main", 6, {"epoch": 8}, model="model", opt="opt"))
    assert changed == ["-    for epoch in range(9):", "+    load()", "+    for epoch in range(9, 9):"]


def test_a_call_that_trains_in_a_library_gets_the_lines_before_it(tmp_path: Path) -> None:
    source = "if True:\n    trainer = Trainer(model)\n    trainer.train()\n"
    changed = _patched(tmp_path, source, _frame("<module>", 3, {}, model="model", opt="trainer.optimizer"))
    assert changed == ["+    load()"]


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_the_patch_applies_to_a_file_with_other_line_ends_and_without_the_last(tmp_path: Path, end: str) -> None:
    source = end.join(("s = '\x0c\u2028'", "for epoch in range(9):", "    opt.step()"))
    _patched(tmp_path, source, _frame("<module>", 3, {"epoch": 2}, model="model"))
    expected = end.join(("s = '\x0c\u2028'", "load()", "for epoch in range(2, 9):", "    opt.step()"))
    assert (tmp_path / "train.py").read_bytes().decode() == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("for e in range(9):", "for e in range(4, 9):"),
        ("for é, e in x: pass", "for é, e in x: pass"),
        ("for e in tqdm(range(first, 9), desc='é'):", "for e in tqdm(range(4, 9), desc='é'):"),
        ("for e in trange(9, leave=False):", "for e in trange(4, 9, leave=False):"),
        ("for e in itertools.count(1):", "for e in itertools.count(4):"),
        ("for e in count():", "for e in count(4):"),
        ("for e in range(0, 9, 2):", "for e in range(4, 9, 2):"),
        ("for e in enumerate(range(9)):", "for e in enumerate(range(9)):"),
        ("for e in range(*args):", "for e in range(*args):"),
        ("for e in loader:", "for e in loader:"),
    ],
)
def test_a_range_begins_where_the_training_was(line: str, expected: str) -> None:
    loop = ast.parse(f"{line.removesuffix(' pass')} pass").body[0]
    assert continued(loop, line, {"e": 4}) == expected
    assert continued(loop, line, {"e": 0.5}) == line

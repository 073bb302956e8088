"""A seeded part of the framework matrix (`scripts/torture frameworks` runs all of it), and what is around a run.

They are not among Jackline's own dependencies: `pip install transformers accelerate lightning` beside it runs these.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.session.framework_torture import SCRIPTS, Bench, Cell, read_result
from tests.session.nursery import EVERY_SAVE, Ended, Nursery
from tests.session.test_integrations import needs

pytestmark = pytest.mark.xdist_group("integrations")
# Some cells each: both accumulations, workers, a kill and a stop at the end of an epoch, and what people add.
CELLS = {
    "transformers": (
        Cell("transformers", 5, accumulate=3, workers=2, scheduler="plateau"),
        Cell("transformers", 6, accumulate=3, scheduler="plateau", how="term", save_every=4),
        Cell("transformers", 13, extra="group_by_length", how="term"),
        Cell("transformers", 7, extra="iterable"),
        Cell("transformers", 5, extra="early stopping"),
        Cell("transformers", 16, extra="counting callback"),
        Cell("transformers", 5, workers=1, scheduler="plateau", how="term", extra="short epochs"),
    ),
    "lightning": (
        Cell("lightning", 5, accumulate=3, workers=2, scheduler="plateau"),
        Cell("lightning", 6, accumulate=3, scheduler="plateau", how="term", save_every=4),
        Cell("lightning", 4, extra="val_check_interval", how="term"),
        Cell("lightning", 6, extra="manual optimization"),
        Cell("lightning", 16, extra="outputs kept"),
        Cell("lightning", 9, extra="iterable"),
        Cell("lightning", 13, extra="stateful stream"),
    ),
    "accelerate": (
        Cell("accelerate", 5, accumulate=3, workers=2, scheduler="plateau"),
        Cell("accelerate", 6, accumulate=3, scheduler="plateau", how="term", save_every=4),
        Cell("accelerate", 13, extra="weighted sampler"),
    ),
}
CHANGED = "data changed since it was saved"
REFUSED = {
    "transformers": (
        Cell("transformers", 6, changes=(("batch", 3),), refusal=CHANGED),
        Cell("transformers", 6, changes=(("accumulate_now", 2),), refusal=CHANGED),
        Cell("transformers", 3, extra="ignore_data_skip", refusal="ignore_data_skip=True cannot be used"),
    ),
    "lightning": (
        Cell("lightning", 6, changes=(("batch", 3),), refusal=CHANGED),
        Cell("lightning", 3, extra="two loaders", refusal="several training loaders together"),
    ),
    "accelerate": (Cell("accelerate", 3, extra="iterable", refusal="cannot be positioned once Accelerate"),),
}


def few(cells: dict[str, tuple[Cell, ...]], count: int) -> list[Any]:
    """The first of each framework; the others are slow tests, and all of them are in `scripts/torture frameworks`."""
    return [
        pytest.param(cell, marks=() if number < count else pytest.mark.slow)
        for some in cells.values()
        for number, cell in enumerate(some)
    ]


@pytest.fixture(scope="module")
def nursery(framework_nursery: Nursery) -> Nursery:
    return framework_nursery


@pytest.fixture(scope="module")
def bench(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("cells"), nursery)


@pytest.mark.parametrize("cell", few(CELLS, 2), ids=str)
def test_a_disturbed_run_ends_like_one_that_was_not(cell: Cell, bench: Bench) -> None:
    needs(cell.library)
    verdict, text = bench.judge(cell)
    assert verdict == "equal", text


@pytest.mark.parametrize("cell", few(REFUSED, 1), ids=str)
def test_what_cannot_be_exact_is_refused_by_name(cell: Cell, bench: Bench) -> None:
    needs(cell.library)
    verdict, text = bench.judge(cell)
    assert verdict == "refused", text


def start(nursery: Nursery, library: str, folder: Path, die: str = "", **cell: object) -> Ended:
    env = {**EVERY_SAVE, "CELL": json.dumps(cell), "DIE": die}
    return nursery.run(SCRIPTS / f"{library}_cell.py", [], folder, env)


@pytest.mark.parametrize(
    ("library", "cell"),
    [
        ("transformers", {"extra": "early stopping", "scheduler": "plateau"}),
        pytest.param("transformers", {"extra": "max_steps"}, marks=pytest.mark.slow),
        ("lightning", {"extra": "early stopping", "scheduler": "plateau"}),
        ("accelerate", {}),
    ],
)
def test_a_complete_run_that_is_started_again_trains_nothing(
    library: str, cell: dict[str, object], nursery: Nursery, tmp_path: Path
) -> None:
    needs(library)
    first = start(nursery, library, tmp_path, **cell)
    assert first.code == 0, first.output
    trained = (tmp_path / "samples.jsonl").read_text()
    again = start(nursery, library, tmp_path, **cell)
    assert again.code == 0, again.output
    assert "[jackline] run 'x' is complete: all " in again.output, again.output
    assert (tmp_path / "samples.jsonl").read_text() == trained
    assert read_result(tmp_path, again)["weights"] == read_result(tmp_path, first)["weights"]


def test_a_killed_trainer_leaves_nothing_in_the_temporary_folder(nursery: Nursery, tmp_path: Path) -> None:
    needs("transformers")
    (tmp_path / "temporary").mkdir()
    for die, code in (("kill:3", -9), ("kill:6", -9)):
        env = {**EVERY_SAVE, "CELL": "{}", "DIE": die, "TMPDIR": str(tmp_path / "temporary")}
        ended = nursery.run(SCRIPTS / "transformers_cell.py", [], tmp_path, env)
        assert ended.code == code, ended.output
    assert not list((tmp_path / "temporary").glob("jackline-*"))
    assert (tmp_path / "runs" / "x" / "transformers-resume" / "trainer_state.json").exists()


LOADED = """
import sys
sys.argv = [sys.argv[0]]
import os
os.environ["CELL"] = '{"extra": "model checkpoint"}'
import lightning.pytorch as pl
import torch
from common import Noisy
from pathlib import Path

source = Path(SCRIPT).read_text().partition("io = JacklineIO")[0]
exec(source)
path = PATH
module = Module.load_from_checkpoint(path)
saved = torch.load(path, weights_only=True)["state_dict"]
assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                     enable_checkpointing=False, max_epochs=4)
trainer.fit(module, DataLoader(Noisy(), batch_size=2), DataLoader(Noisy(6), batch_size=3), ckpt_path=path)
print("loaded", trainer.global_step)
"""


def test_a_lightning_run_is_exported_as_a_file_that_lightning_alone_loads(nursery: Nursery, tmp_path: Path) -> None:
    needs("lightning")
    ended = start(nursery, "lightning", tmp_path, extra="model checkpoint")
    assert ended.code == 0, ended.output
    command = [sys.executable, "-m", "jackline", "checkpoints", "export", "x", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run([*command, "--out", str(tmp_path / "away")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exported = tmp_path / "away" / "step-00000039.ckpt"
    assert f"load_from_checkpoint('{exported}')" in done.stdout
    best = next((tmp_path / "out").glob("*.ckpt"))
    for path in (exported, best):  # ModelCheckpoint's own file is an ordinary one too
        script = LOADED.replace("SCRIPT", repr(str(SCRIPTS / "lightning_cell.py"))).replace("PATH", repr(str(path)))
        place = tmp_path / path.stem
        place.mkdir()
        (place / "common.py").write_text((SCRIPTS / "common.py").read_text())
        found = nursery.run(script, [], place)
        assert found.code == 0, found.output
        assert "loaded 52" in found.output


def test_fit_without_the_path_to_resume_from_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    needs("lightning")
    code = (SCRIPTS / "lightning_cell.py").read_text().replace(", ckpt_path=io.resume_path()", "")
    assert code != (SCRIPTS / "lightning_cell.py").read_text()
    (tmp_path / "common.py").write_text((SCRIPTS / "common.py").read_text())
    env = {**EVERY_SAVE, "CELL": "{}"}
    assert nursery.run(code, [], tmp_path, {**env, "DIE": "kill:5"}).code == -9
    ended = nursery.run(code, [], tmp_path, {**env, "DIE": ""})
    assert ended.code == 1 and re.search(
        r"has a checkpoint of step \d, but fit\(\) starts at step 0", ended.output
    ), ended.output

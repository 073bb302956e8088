"""A recipe of one's own in one file: the guide's three, and what a person may get wrong."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import jackline
from jackline.cli.models.init import command as init
from jackline.errors import CannotResume, UsageError
from jackline.memory.plan.gpus import find_gpu
from jackline.rundir.layout import RunDir
from jackline.settings import at_least, setting, settings_of
from jackline.trainer.config import resolve
from jackline.trainer.loop import train
from jackline.trainer.own.samples import Order, SampleLoader, Samples
from jackline.trainer.own.task import candidates, summed
from jackline.trainer.report.console import Console
from jackline.trainer.trained.sample import Sampling
from tests.session.nursery import EVERY_SAVE, ROOT, Nursery

SCRIPT = Path(__file__).with_name("own_training.py")
GUIDES = [
    (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8") for name in ("own-recipe", "fine-tune")
]
FILES = dict(re.findall(r"<!-- file: (\w+\.py) -->\n\n```python\n(.*?)```", "".join(GUIDES), re.DOTALL))
NEEDS = {"tuned.py": "transformers", "adapted.py": "peft"}
QUICK = ["--quick", "rehearse=no", "max_steps=8", "save_every_steps=3", "eval_every=4", "full_eval=no"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the nursery: sums over more threads have other last bits
    yield tmp_path
    torch.set_num_threads(threads)


def write(folder: Path, body: str, name: str = "mine.py") -> str:
    """A recipe with a linear model over random rows, and `body` in its class."""
    text = f"""
import torch
from torch import nn
from torch.nn import functional
import jackline
from jackline.settings import at_least, setting


class Mine(jackline.Recipe):
    batch_size = 4
    max_steps = 6

    def make_model(self):
        return nn.Linear(3, 2)

    def train_data(self):
        return torch.randn(10, 3), torch.randint(2, (10,))

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

{body}
"""
    (folder / name).write_text(text)
    return name


def weights_of(run: RunDir) -> bytes:
    newest = max(run.checkpoints.glob("step-*"))
    assert newest.name == "step-00000008"
    return (newest / "model.safetensors").read_bytes() + (newest / "optimizer.safetensors").read_bytes()


def logged(run: RunDir, name: str) -> dict[int, str]:
    lines = map(json.loads, run.metrics(0).read_text().splitlines())
    return {line["step"]: float(line[name]).hex() for line in lines if name in line}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_of_the_guide_killed_in_a_step_ends_bit_equal(
    name: str, nursery: Nursery, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    assert len(FILES[name].splitlines()) < 60
    (here / name).write_text(FILES[name])
    killed, whole = RunDir(here / "runs" / "killed"), RunDir(here / "runs" / "whole")
    ended = nursery.start(SCRIPT, [str(killed.path), name, *QUICK], here, {**EVERY_SAVE, "KILL_AT": "6"}).wait()
    assert ended.code == -signal.SIGKILL, ended.output
    monkeypatch.setenv("JACKLINE_TEST_EVERY_SAVE", "1")
    assert train(resolve(name, QUICK), killed).steps == 8
    train(resolve(name, [*QUICK, "rehearse=yes"]), whole)  # a rehearsal leaves no trace
    assert weights_of(killed) == weights_of(whole)
    assert logged(killed, "loss").items() <= logged(whole, "loss").items()
    assert logged(killed, "val_loss")[8] == logged(whole, "val_loss")[8]
    trained = jackline.load(whole.path, "latest")
    assert not trained.config.is_language and trained.tokenizer is None  # although one declares seq_len
    assert trained.step == 8 and not trained.model.training
    if trained.config.can_sample:
        texts = ["".join(trained.stream("7", Sampling(seed=1))) for _ in range(2)]
        assert texts[0] and texts[0] == texts[1]
    else:
        with pytest.raises(UsageError, match="cannot be sampled from"):
            list(trained.stream("x"))


def test_init_writes_the_guides_recipe_and_overwrites_nothing(here: Path) -> None:
    done = CliRunner().invoke(init, ["recipe", "shapes"])
    assert done.exit_code == 0 and "jackline train shapes.py --quick" in done.output
    text = (here / "shapes.py").read_text()
    assert text.endswith(FILES["shapes.py"]) and len(text.splitlines()) < 60
    again = CliRunner().invoke(init, ["recipe", "shapes"])
    assert isinstance(again.exception, UsageError) and "exists already" in str(again.exception)
    CliRunner().invoke(init, ["recipe", "3-d.py"])
    assert "class Recipe3D(jackline.Recipe)" in (here / "3-d.py").read_text()


def test_attributes_with_a_type_are_settings_and_those_without_change_defaults(here: Path) -> None:
    body = '    width: int = setting(8, "How wide.", allowed=at_least(1))\n    lr = 0.5\n    dropout: float = 0.2'
    config = resolve(write(here, body), ["width=16", "batch_size=2"]).config
    assert (config.width, config.lr, config.dropout, config.batch_size) == (16, 0.5, 0.2, 2)  # type: ignore[attr-defined]
    assert settings_of(type(config))["width"].declared.meaning == "How wide."
    assert settings_of(type(config))["lr"].type is float
    with pytest.raises(UsageError, match="width=0 is too small"):
        resolve("mine.py", ["width=0"])
    with pytest.raises(UsageError, match="'seq_len' means nothing"):
        resolve("mine.py", ["seq_len=4"])


def test_the_decorator_may_be_written_and_loses_nothing() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Decorated(jackline.Recipe):
        width: int = setting(8, "How wide.", allowed=at_least(1))

    assert Decorated(width=3).width == 3
    assert settings_of(Decorated)["width"].declared.meaning == "How wide."


@pytest.mark.parametrize(
    ("body", "words", "wrong"),
    [
        ("    def model(self): ...", [], "'model' of class Mine is the name of a setting"),
        ("    make_model = jackline.Recipe.make_model", [], r"has no make_model\(self\)"),
        ("    def make_model(self): return 3", [], "returned int, not an nn.Module"),
        ("    def make_model(self): return nn.Linear(3, 2).requires_grad_(False)", [], "without weights to train"),
        ("    def loss(self, model, batch): return model(batch[0])", [], "returned a tensor of 4x2, not one number"),
        ("    def loss(self, model, batch): return 3.0", [], "returned float, not a tensor"),
        ("    def train_data(self): return iter([])", [], "which cannot be trained on"),
        ("    def train_data(self): return []", [], r"train_data\(\) has no samples"),
        ("    def train_data(self): return torch.ones(3, 3), torch.ones(4)", [], "different numbers of rows: 3, 4"),
        ("    def train_data(self): return torch.utils.data.DataLoader([1])", [], "returned a DataLoader"),
        ("    def val_data(self): return self.train_data()", ["metric=val_acc"], "metric=val_acc is not measured"),
        ("    data: str = ''", [], "names no data"),
        (
            "    def make_optimizer(self, model): return [1, 2]",
            [],
            "returned list, not one optimizer",
        ),
    ],
)
def test_what_a_person_may_get_wrong_is_named(here: Path, body: str, words: list[str], wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        train(resolve(write(here, body), words), RunDir(here / "runs" / "x"))


def test_few_samples_are_validated_on_as_a_whole_and_another_torch_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(here, "    def val_data(self): return torch.randn(40, 3), torch.randint(2, (40,))")
    words, run = ["rehearse=no", "eval_every=2", "save_every_steps=2"], RunDir(here / "runs" / "moved")
    with monkeypatch.context() as older:
        older.setattr(torch, "__version__", "2.9.1+cu126")
        train(resolve(name, [*words, "max_steps=4"]), run)
    assert "quick validation, 40 of 40 samples" in capsys.readouterr().out
    train(resolve(name, [*words, "max_steps=6"]), run)
    said = capsys.readouterr()
    assert f"torch: 2.9.1+cu126 -> {torch.__version__}" in said.out + said.err


def test_a_file_with_no_recipe_or_several_leads_on(here: Path) -> None:
    (here / "script.py").write_text("print('training')\n")
    with pytest.raises(UsageError, match="has no recipe") as found:
        resolve("script.py")
    assert "jackline run -- python script.py" in str(found.value)
    write(here, "    pass\n\n\nclass Other(Mine):\n    lr = 0.25")
    with pytest.raises(UsageError, match="has 2 recipes"):
        resolve("mine.py")
    assert resolve("mine.py:Other").config.lr == 0.25


class Drawn:
    """Samples with a number drawn from each of three libraries, as augmentation does."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        import numpy as np

        return torch.tensor([index, float(torch.rand(())), random.random(), float(np.random.rand())])


def batches_of(loader: SampleLoader, count: int) -> list[Any]:
    return [next(loader).given.tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import math\nimport nowhere_to_be_found\n", ["own_file.py:2: import nowhere", "No module named"]),
        ("def build(:\n", ["own_file.py", "SyntaxError"]),
        (
            "def build():\n    return 1 / 0\nx = [build()]\n",
            ["own_file.py:3: x", "own_file.py:2: return 1 / 0", "by zero"],
        ),
        ("raise SystemExit('no GPU')\n", ["own_file.py:1:", "SystemExit: no GPU"]),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_by_its_own_line(here: Path, text: str, words: list[str]) -> None:
    Path("own_file.py").write_text(text)
    with pytest.raises(UsageError, match=r"'own_file\.py' cannot be loaded") as caught:
        resolve("own_file.py", [], [])
    assert all(word in str(caught.value) for word in words), caught.value
    assert "importlib" not in str(caught.value)


def test_batches_depend_on_seed_epoch_and_sample_alone() -> None:
    def make(batch_size: int = 4) -> SampleLoader:
        samples = Samples(Drawn(), torch.stack, name="train_data()", seed=3)
        return SampleLoader(samples, Order(batch_size, seed=3))

    whole = batches_of(make(), 7)
    assert [len(batch) for batch in whole] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(row[0] for batch in whole[:3] for row in batch) == list(range(10))
    for place in (1, 3, 5):
        before, after = make(), make()
        batches_of(before, place)
        torch.rand(7)
        after.seek(before.state())
        assert batches_of(after, 7 - place) == whole[place:]
    before, other = make(), make(batch_size=3)
    batches_of(before, 1)
    other.seek(before.state())  # another batch size continues with the samples that were not seen
    assert [row for batch in batches_of(other, 2) for row in batch] == [row for batch in whole[1:3] for row in batch]
    with pytest.raises(CannotResume, match="num_samples was 9, is 10"):
        make().seek({**before.state(), "num_samples": 9})


def test_workers_and_training_mode_change_nothing(here: Path) -> None:
    def make(num_workers: int) -> SampleLoader:
        samples = Samples(Drawn(), torch.stack, name="train_data()", seed=3)
        return SampleLoader(samples, Order(4, seed=3, num_workers=num_workers))

    alone, helped = make(0), make(1)
    assert batches_of(helped, 4) == batches_of(alone, 4)
    helped.close()
    name = write(here, "    def make_model(self): return nn.Linear(3, 2).eval()")
    assert resolve(name).config.make_task(Console(), here).learner.model.training  # type: ignore[union-attr]


def test_a_loss_may_be_a_mean_or_a_sum_with_its_count() -> None:
    batch = (torch.ones(5, 2),)
    assert summed(torch.tensor(2.0), batch, "loss()") == (torch.tensor(10.0), 5)
    assert summed((torch.tensor(2.0), torch.tensor(3)), batch, "loss()") == (torch.tensor(2.0), 3)


def test_an_own_optimizer_keeps_the_ratio_of_its_rates_and_negative_losses_are_no_alarm(here: Path) -> None:
    body = """
    schedule = "constant"
    lr = 0.1
    max_steps = 40

    def loss(self, model, batch):
        return model(batch[0]).mean() - 100

    def make_optimizer(self, model):
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
"""
    run = RunDir(here / "runs" / "own")
    train(resolve(write(here, body), ["rehearse=no"]), run)
    state = json.loads((max(run.checkpoints.glob("step-*")) / "state.json").read_text())
    assert found_rates(state) == pytest.approx([0.1, 0.05])
    assert not [line for line in run.session_events(0).read_text().splitlines() if '"alarm"' in line]


def found_all(value: Any, name: str) -> list[float]:
    """Every number of that name in a nested value."""
    if isinstance(value, dict):
        own = [value[name]] if isinstance(value.get(name), float | int) else []
        return own + [one for part in value.values() for one in found_all(part, name)]
    return [one for part in value for one in found_all(part, name)] if isinstance(value, list) else []


def found_rates(value: Any) -> list[float]:
    if isinstance(value, dict):
        own = [value["lr"]] if isinstance(value.get("lr"), float) and "lr_scale" in value else []
        return own + [rate for part in value.values() for rate in found_rates(part)]
    return [rate for part in value for rate in found_rates(part)] if isinstance(value, list) else []


def test_it_is_planned_and_its_changed_file_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(here, "    save_every_steps = 2")
    gpu = find_gpu("T4")
    (found,) = candidates(gpu, [name, "batch_size=64"])
    assert found.shown["parameters"] == 8 and found.job.global_batch == 64
    run = RunDir(here / "runs" / "kept")
    train(resolve(name, ["rehearse=no", "max_steps=4"]), run)
    assert run.recipe_file.read_text() == Path(name).read_text()
    write(here, "    save_every_steps = 2\n    # changed")
    train(resolve(name, ["rehearse=no", "max_steps=6", "lr=0.5", "weight_decay=0"]), run)
    said = capsys.readouterr()
    assert "mine.py has changed since this run was started" in said.out
    assert "the saved one stays in use" not in said.err
    state = json.loads((run.checkpoints / "step-00000006" / "state.json").read_text())
    assert set(found_all(state, "weight_decay")) == {0.0}
    Path(name).unlink()
    assert isinstance(jackline.load(run.path, "latest").model, nn.Linear)  # from its copy

"""`jackline doctor RECIPE`: what it thinks of the facts, and what it finds by really trying."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jackline.errors import UsageError
from jackline.trainer.config import resolve_words
from jackline.trainer.doctor.examine import Request, _judge_data, examine, versions_finding
from jackline.trainer.doctor.findings import (
    DiskFacts,
    Finding,
    StepTaken,
    TimeFacts,
    count_kept,
    judge_disk,
    judge_gpu,
    judge_memory,
    judge_schedule,
    judge_step,
    judge_time,
    judge_unused_gpu,
    judge_vocabulary,
    runs_on,
)
from jackline.trainer.optim.schedule import Schedule
from jackline.trainer.report.console import Console
from jackline.trainer.sentinels.floor import Floor
from tests.places import Unavailable, small_disk

GIB = 2**30
BUILT_FOR = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other take seconds a step beside other busy programs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- judgements


def test_a_gpu_this_torch_has_no_code_for_is_a_problem_though_it_is_available() -> None:
    assert judge_gpu("Tesla P100-PCIE-16GB", (6, 0), BUILT_FOR, "2.11.0+cu128") == Finding(
        "device",
        "problem",
        "torch 2.11.0+cu128 has no code for Tesla P100-PCIE-16GB (sm_60); it was built for sm_75, sm_80, sm_86,"
        " sm_90, sm_100, sm_120",
        "install a torch build for this GPU, or use another GPU; device=cpu trains without it",
    )
    assert judge_gpu("NVIDIA H200", (9, 0), BUILT_FOR, "2.11.0") == Finding(
        "device", "ok", "NVIDIA H200 (sm_90); torch 2.11.0 has code for it"
    )


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((8, 9), ["sm_80"], True),  # same major, higher minor
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),  # PTX is compiled for what is newer
        ((7, 5), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),  # for one architecture only
        ((12, 0), BUILT_FOR, True),
        ((9, 0), [], False),
    ],
)
def test_which_code_runs_on_which_gpu(capability: tuple[int, int], built_for: list[str], expected: bool) -> None:
    assert runs_on(capability, built_for) is expected


def test_a_gpu_that_torch_does_not_see_is_a_problem() -> None:
    assert judge_unused_gpu("NVIDIA L4", "2.13.0+cpu", None).text == (
        "NVIDIA L4 is here, but torch 2.13.0+cpu cannot use it: it was built without CUDA"
    )
    assert judge_unused_gpu("NVIDIA L4", "2.13.0", "13.0").text == (
        "NVIDIA L4 is here, but torch 2.13.0 cannot use it: it was built for CUDA 13.0, which this driver may be too"
        " old for"
    )


def test_a_vocabulary_must_fit_into_the_model() -> None:
    assert judge_vocabulary("gpt2", 50_257, 32_000, 100) == Finding(
        "vocabulary",
        "problem",
        "the tokenizer 'gpt2' has 50,257 tokens, the model has room for 32,000",
        "vocab_size=0 takes the tokenizer's own",
    )
    assert judge_vocabulary("gpt2", 50_257, 50_304, 60_000).state == "problem"
    assert judge_vocabulary("gpt2", 50_257, 50_264, 50_256).state == "note"
    assert judge_vocabulary("gpt2", 50_257, 50_304, 50_256) == Finding(
        "vocabulary", "ok", "50,257 tokens of 'gpt2' in a model of 50,304; largest id seen 50,256"
    )


def test_the_learning_rate_is_shown_at_its_points_with_a_picture() -> None:
    found = judge_schedule(Schedule("cosine", 3e-4, 3e-5, 100, 1000))
    assert found.state == "ok"
    assert found.text.splitlines()[:5] == [
        "cosine: 100 steps of warm-up to 0.0003, then down to the floor of 3e-05 at step 999",
        "first step (step 0): 2.97e-06",
        "end of warm-up (step 100): 0.0003",
        "middle (step 500): 0.000188",
        "last step (step 999): 3e-05",
    ]
    assert sum("*" in line for line in found.text.splitlines()) >= 4
    assert judge_schedule(Schedule("cosine", 3e-4, 3e-5, 100, 50)).state == "note"


def test_the_disk_must_hold_all_checkpoints_of_the_whole_run() -> None:
    assert count_kept(3, 0, 1000, keeps_best=True) == 4
    assert count_kept(1, 100, 1000, keeps_best=False) == 12
    facts = DiskFacts(GIB, 4, 100 * GIB, "/runs")
    text = "4 checkpoints of 1.0 GiB kept and one being written: 5.0 GiB of 100 GiB free in /runs"
    assert judge_disk(facts) == Finding("disk", "ok", text)
    assert judge_disk(replace(facts, free_bytes=8 * GIB)).state == "note"
    full = judge_disk(replace(facts, free_bytes=5 * GIB))
    assert full.state == "problem" and full.text.endswith("5.0 GiB free in /runs: the run would fill the disk")
    assert full.hint == "a smaller keep_last or larger keep_every, or another place with --runs-dir PATH"


def test_the_time_is_held_against_the_limit_or_the_notebooks_own() -> None:
    facts = TimeFacts(step_s=0.5, total_steps=72_000, tokens_per_step=32_768, eval_s=600)
    rate = "72,000 steps of about 0.5 s (65,536 tokens/s): 10 h 10 min with validation"
    assert judge_time(facts).text == f"{rate}; no time limit"
    assert judge_time(replace(facts, limit_s=11 * 3600)).text == f"{rate}; fits into the time limit of 11 h"
    short = judge_time(replace(facts, limit_s=5.1 * 3600))
    text = f"{rate}; the time limit is 5 h 6 min: it gets to about step 36,118"
    assert (short.state, short.text) == ("note", text)
    colab = replace(facts, session="Colab", session_left_s=11.5 * 3600)
    assert judge_time(colab).text == f"{rate}; fits into the rest of this Colab session of 11 h 30 min"
    assert judge_time(replace(colab, step_s=1.0)).state == "note"
    assert "less, because it will be compiled" in judge_time(replace(facts, is_compiling=True)).text


def test_a_first_step_shows_what_would_never_learn() -> None:
    good = StepTaken(10.9, math.log(50_304), 2.5, (), 148, 0.25)
    assert judge_step(good) == Finding(
        "step",
        "ok",
        "loss 10.9000 (guessing is 10.8258), gradient norm 2.5; all 148 weights get a gradient; 0.2 s",
    )
    cut = judge_step(replace(good, untouched=("blocks.0.up.weight", "a", "b", "c")))
    assert cut.state == "problem"
    assert cut.text.endswith("4 of 148 weights get no gradient: blocks.0.up.weight, a, b, ...")
    assert judge_step(replace(good, loss=float("nan"))).state == "problem"
    assert judge_step(replace(good, grad_norm=float("inf"))).state == "problem"
    assert judge_step(replace(good, loss=25.0)).state == "note"


def test_memory_is_a_problem_only_when_it_is_not_there() -> None:
    assert judge_memory(4 * GIB, 8 * GIB, "on the GPU", "measured") == Finding(
        "memory", "ok", "measured 4.0 GiB of 8.0 GiB free on the GPU"
    )
    assert judge_memory(int(7.5 * GIB), 8 * GIB, "on the GPU", "x").state == "note"
    assert judge_memory(9 * GIB, 8 * GIB, "on the GPU", "x").state == "problem"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions_finding("2.13").state == "ok"
    monkeypatch.setattr("jackline.trainer.doctor.examine._PACKAGES", ("numpy", "surely-not-installed"))
    found = versions_finding("2.13")
    assert found.state == "note" and found.text.endswith("; not installed: surely-not-installed")


# -- trying


def findings(tmp_path: Path, *words: str) -> list[Finding]:
    told: list[Finding] = []
    request = Request("demo", words, tmp_path / "runs")
    resolved = resolve_words("demo", ["--quick", f"data_dir={tmp_path / 'data'}", *words])
    with Console() as console:
        examine(resolved, request, console, told.append)
    return told


def corpus(tmp_path: Path) -> str:
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune. "
    (tmp_path / "corpus").mkdir(exist_ok=True)
    for number in range(40):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"Chapter {number}. " + text * 20)
    return f"data={tmp_path / 'corpus'}/*.txt"


def problem(told: list[Finding]) -> Finding:
    (found,) = [finding for finding in told if finding.state == "problem"]
    return found


def test_a_good_recipe_is_tried_through_and_leaves_only_the_data_cache(tmp_path: Path) -> None:
    told = findings(tmp_path, corpus(tmp_path))
    assert [finding.name for finding in told] == [
        "settings", "lr", "versions", "device", "precision", "data", "vocabulary", "context", "model", "memory",
        "step", "disk", "saving", "time",
    ]  # fmt: skip
    assert {finding.state for finding in told} <= {"ok", "note"}, told
    by_name = {finding.name: finding for finding in told}
    assert "begins with 'Chapter " in by_name["data"].text
    assert "would mean a data leak" in by_name["data"].text
    assert "all 52 weights get a gradient" in by_name["step"].text
    assert "saved, loaded and equal in every bit" in by_name["saving"].text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "data"]


def test_conversations_are_tried_as_they_are_trained_on(tmp_path: Path) -> None:
    talks = tmp_path / "talks.jsonl"
    talks.write_text("".join(f'{{"prompt": "What is {n}?", "response": "It is {n}."}}\n' for n in range(60)))
    told = {finding.name: finding for finding in findings(tmp_path, f"data={talks}", "chat=true", "seq_len=48")}
    assert {finding.state for finding in told.values()} <= {"ok", "note"}, told
    assert told["data"].text.endswith("rows of conversations to train on")
    assert "saved, loaded and equal in every bit" in told["saving"].text


def test_a_source_that_cannot_be_reached_is_a_problem_and_nothing_is_put_in_its_place(tmp_path: Path) -> None:
    told = findings(tmp_path, f"data={tmp_path}/nowhere/*.txt")
    found = problem(told)
    assert found.name == "data"
    assert found.text == (
        f"{tmp_path}/nowhere/*.txt cannot be read: cannot list {tmp_path}/nowhere: No such file or directory"
    )
    assert found.hint.endswith(
        "--data SOURCE trains on other data: a path, glob, http(s)://, hf://, or python-stdlib"
    )
    assert told[-1] == Finding("not tried", "note", "memory, step and saving: the problem above comes first")


def test_a_vocabulary_that_does_not_fit_is_found_before_a_step(tmp_path: Path) -> None:
    found = problem(findings(tmp_path, corpus(tmp_path), "vocab_size=128"))
    assert found.text == "the tokenizer 'bytes' has 257 tokens, the model has room for 128"


@pytest.mark.slow
def test_a_disk_too_small_for_the_whole_run_is_found_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    try:
        with small_disk(tmp_path / "runs", "60M"):
            told = findings(tmp_path, corpus(tmp_path))
            assert list((tmp_path / "runs").iterdir()) == []
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = problem(told)
    assert (found.name, found.text) == (
        "disk",
        f"4 checkpoints of 37.3 MiB kept and one being written: 186 MiB of 60.0 MiB free in {tmp_path / 'runs'}:"
        " the run would fill the disk",
    )
    assert [finding.name for finding in told[-2:]] == ["not tried", "time"]


def test_a_place_that_cannot_be_saved_to_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    found = problem(findings(tmp_path, corpus(tmp_path)))
    assert found.name == "saving" and "File exists" in found.text
    assert found.hint == "another place for runs: --runs-dir PATH"


def test_a_step_that_cannot_fit_is_predicted_and_not_tried(tmp_path: Path) -> None:
    words = (corpus(tmp_path), "model=medium", "seq_len=256", "batch_size=200", "micro_batch=200")
    found = problem(findings(tmp_path, *words))
    assert found.name == "memory" and found.text.startswith("a step is predicted to need ")


def test_noise_is_called_noise() -> None:
    floor = Floor(5.27, "these tokens are noise, ln(256) = 5.55 nats each", is_noise=True)
    first = SimpleNamespace(tokens=np.zeros((2, 65), np.int64))
    opened = SimpleNamespace(first=first, first_text="\x00" * 500, floor=floor, vocab_size=257, took_s=0.5)
    told: list[Finding] = []
    _judge_data(resolve_words("demo", ["--quick"]).config, opened, told.append)
    assert (told[0].name, told[0].state) == ("data", "note")
    assert told[0].text.splitlines()[-1] == "these tokens are noise, ln(256) = 5.55 nats each"
    assert told[0].hint == "there is nothing to learn in noise: is it the right column?"
    assert len(told[0].text) < 1000, "a first document is shown, not poured out"


def test_a_precision_the_device_has_not_is_a_problem(tmp_path: Path) -> None:
    found = problem(findings(tmp_path, "precision=fp16", "device=cpu"))
    assert (found.name, found.text) == ("precision", "fp16 needs a GPU: its loss scaling is of no use on a CPU")


def test_wrong_settings_are_usage_errors_before_anything_is_tried(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        findings(tmp_path, "learning_rte=1")
    assert str(caught.value) == (
        "error: unknown setting 'learning_rte' for recipe 'demo'\nhint: did you mean 'learning_rate'?"
    )

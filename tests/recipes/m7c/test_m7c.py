"""The recipe with sparse attention as real trainings: on FineWeb-Edu's columns, on noise, and killed on the way."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from jackline.data.spec import DataSpec
from jackline.machine.gpu.watch import gpu_names
from jackline.memory.__main__ import _all_sizes
from jackline.memory.plan.gpus import find_gpu
from jackline.memory.predict.step import predict
from jackline.models.nsa.attention import SparseAttention
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSA_SHAPES, NSAShape
from jackline.recipes.m7c.method import AttentionStatistics, is_due
from jackline.recipes.m7c.recipe import candidates
from jackline.trainer.config import TrainConfig, resolve
from jackline.trainer.corpus import spec_of
from jackline.trainer.doctor.examine import Request, examine
from jackline.trainer.doctor.findings import Finding, judge_context
from jackline.trainer.optim.learner import make_learner
from jackline.trainer.planning.plan import PlannedAttention, choose_micro_batch, job_of, shape_of
from jackline.trainer.report.console import Console
from jackline.trainer.sentinels.facts import StepFacts
from jackline.trainer.sentinels.outputs import CollapsedGates
from jackline.trainer.task import Between
from tests.data.corpora import all_tokens, build_cache, expected_bytes, make_texts, read_texts
from tests.session.nursery import Nursery
from tests.shell import Shell
from tests.trainer.test_loop import Trainings
from tests.trainer.test_tensorboard import points

needs_card = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs a CUDA GPU and Triton: compiled with our kernels it was not tried",
)
GATES = ("gate_compressed", "gate_selected", "gate_window")
STEP = StepFacts(step=0)
IDS = torch.arange(100)[None] % 64


def write_fineweb(folder: Path, texts: list[str]) -> None:
    """Two shards with the ten columns; the second has one more, as some of the real ones do."""
    folder.mkdir()
    half = len(texts) // 2
    for number, part in enumerate((texts[:half], texts[half:])):
        count = len(part)
        columns = {
            "text": part,
            **{name: [name] * count for name in ("id", "dump", "url", "file_path", "language")},
            **{name: [0.5] * count for name in ("language_score", "score")},
            **{name: [3] * count for name in ("token_count", "int_score")},
        }
        if number:
            columns["date"] = ["2024-06-01"] * count
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{number:03d}_00000.parquet")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    found.env.update(JACKLINE_DATA=str(tmp_path / "data"), OMP_NUM_THREADS="1")
    yield found
    found.close()


@pytest.fixture
def trainings(nursery: Nursery, corpus: Path, tmp_path: Path) -> Trainings:
    return Trainings(nursery, corpus, tmp_path)


@pytest.mark.slow
def test_every_flag_at_once_really_trains_on_fineweb_and_tells_what_gates_and_blocks_do(shell: Shell) -> None:
    write_fineweb(shell.work / "shards", make_texts(300))
    shell.env.update(CONFIG="configs/train_showcase.yaml", NSA_BATCH_SIZE="64")
    typed = (
        "--dataset fineweb_edu_local --local-path shards --ddp 0 --steps 12 --seq-len 300 --batch-size 1 "
        "--accum-batches 4 --no-gc --model toy --tokenizer bytes --val-fraction 0.2 --eval-every 6 --stats-every 5 "
        "--micro-batch 1 --name m"
    )
    done = shell.jackline("train", "m7c", *typed.split())
    assert done.code == 0, done
    assert "[start] $CONFIG=configs/train_showcase.yaml is not read: --config FILE\n" in done.out
    assert "[start] $NSA_BATCH_SIZE=64 is not read: --batch-size N\n" in done.out
    words = "1 x 128, 8 heads in 2 groups, 270,883 parameters; a token reads compressed blocks of 16"
    assert f"[model] toy: {words}, 8 chosen ones of 32 and the last 64 tokens\n" in done.out
    assert "[model] attention in plain torch, " in done.out
    assert "[plan] batch 4 = 4 x micro-batch 1 (as asked), " in done.out
    assert re.findall(r"^\[eval\] step (\d+): val_loss ", done.out, re.M) == ["6", "12"]
    assert "[end] end       finished at step 12 of 12" in done.out

    assert json.loads((shell.runs / "m" / "run.json").read_text())["machine"]["cards"] == gpu_names()
    lines = [json.loads(line) for line in (shell.runs / "m" / "metrics-0.jsonl").read_text().splitlines()]
    facts = {line["step"]: line for line in lines if "gate_entropy" in line}
    assert list(facts) == [1, 5, 10]  # and no other step waits for them
    for line in facts.values():
        assert sum(line[name] for name in GATES) == pytest.approx(1, abs=1e-5)
        assert 0.9 < line["gate_entropy_least"] <= line["gate_entropy"] <= math.log(3) + 1e-6
        assert line["selected_blocks_most"] == 8  # 300 tokens have 10 blocks: a choice was made
        assert line["selected_blocks"] == pytest.approx(sum(min(8, t // 32 + 1) for t in range(300)) / 300)
        reads = [min(t + 1, 7 * 32 + t % 32 + 1) / (t + 1) for t in range(300)]
        assert line["selected_coverage"] == pytest.approx(sum(reads) / 300, abs=1e-5)
    curve = points(shell.runs / "m" / "tb", "gate_entropy")
    assert [step for step, _ in curve] == [1, 5, 10]
    assert curve[0][1] == pytest.approx(facts[1]["gate_entropy"])


@pytest.mark.slow
def test_killed_it_ends_bit_equal_also_with_recomputed_layers(trainings: Trainings) -> None:
    words = ("seq_len=300", "batch_size=2", "recompute=yes", "stats_every=4")
    whole = trainings.finish("whole", *words, RECIPE="m7c", SLOW_AT="5")
    assert re.search(r"^\[train\] \.\.\. step 5/12, forward, \d\.\d s so far$", whole.output, re.M), whole.output
    ended = trainings.run("killed", *words, KILL_AT="8", RECIPE="m7c")
    assert ended.code == -signal.SIGKILL, ended.output
    ended = trainings.finish("killed", *words, RECIPE="m7c")
    assert "resuming from step-" in ended.output, ended.output
    assert trainings.weights("killed") == trainings.weights("whole")
    assert trainings.losses("killed") == trainings.losses("whole")
    assert trainings.metrics("killed", "gate_entropy") == trainings.metrics("whole", "gate_entropy")


@pytest.mark.slow
def test_a_real_training_on_256_random_symbols_never_predicts_one(trainings: Trainings, tmp_path: Path) -> None:
    """128 tokens are twice the window: where the forerunner's window read the next token. No honest loss is below
    ln 256 = 5.545."""
    vocabulary = {**{f"w{number}": number for number in range(256)}, "<|endoftext|>": 256}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "symbols.json"))
    rng_state = random.Random(0)
    write_fineweb(
        tmp_path / "noise", [" ".join(f"w{rng_state.randrange(256)}" for _ in range(2000)) for _ in range(40)]
    )
    words = ("seq_len=128", "batch_size=8", "max_steps=45", "lr=4e-3", "warmup_steps=4", "save_every_steps=0")
    sources = (
        f"data={tmp_path / 'noise'}",
        f"data_dir={tmp_path / 'data'}",
        f"tokenizer={tmp_path / 'symbols.json'}",
    )
    trainings.finish("noise", *words, *sources, "eval_every=45", RECIPE="m7c")
    losses = list(trainings.metrics("noise", "loss").values())
    assert len(losses) == 45
    assert min(losses) >= 5.5
    assert sum(losses[-10:]) / 10 < math.log(256) + 0.12  # it has learnt that all are alike: it does train
    assert trainings.metrics("noise", "val_loss")[45] >= 5.5


@needs_card
@pytest.mark.parametrize("recompute", ["no", "yes"])
def test_on_a_gpu_it_is_compiled_in_bf16_and_read_by_our_kernels(recompute: str, shell: Shell) -> None:
    typed = (
        "--model smoke --tokenizer bytes --data python-stdlib --seq-len 512 --batch-size 16 --steps 40 --lr 1e-3 "
        f"--warmup 4 --stats-every 20 --compile on --recompute {recompute} --attention sparse --name gpu"
    )
    done = shell.jackline("train", "m7c", *typed.split())
    assert done.code == 0, done
    assert "[model] attention by our own kernels: " in done.out
    assert "[plan] compiled: compile=on\n" in done.out
    lines = [json.loads(line) for line in (shell.runs / "gpu" / "metrics-0.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 5.5 and losses[-1] < 3.5
    assert [line["step"] for line in lines if "gate_entropy" in line] == [1, 20, 40]


def test_documents_are_packed_whole_and_none_is_in_both_splits(tmp_path: Path) -> None:
    texts = [*make_texts(200), "long " * 3000]  # 15,000 bytes, fifteen windows
    write_fineweb(tmp_path / "shards", texts)
    words = ("--local-path", str(tmp_path / "shards"), "--tokenizer", "bytes", "--val-fraction", "0.2")
    config = resolve("m7c", words).config
    found = {split: read_texts(_with_column(spec_of(config, split))) for split in ("train", "validation")}  # type: ignore[arg-type]
    assert not set(found["train"]) & set(found["validation"])
    assert sorted([*found["train"], *found["validation"]]) == sorted(texts)
    assert len(found["validation"]) > 20
    cache = build_cache(spec_of(config, "train"), tmp_path / "cache")
    assert np.array_equal(all_tokens(cache), expected_bytes(found["train"]))


def _with_column(spec: DataSpec) -> DataSpec:
    return spec.with_columns(["text"])


def test_the_first_step_and_every_so_many_are_looked_at() -> None:
    assert [step for step in range(1, 151) if is_due(step, 50)] == [1, 50, 100, 150]
    assert not is_due(1, 0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The tensors are tiny, and threads that wait for each other make a busy machine ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def looked_at(model: NSAModel, num_looks: int, tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """What is measured of a real model after each of its steps, as the loop asks for it."""
    additions = AttentionStatistics(stats_every=1)
    task: Any = SimpleNamespace(learner=make_learner(model, TrainConfig(), "fp32", torch.device("cpu")))
    additions.bind(task)
    found = []
    for step in range(num_looks):
        additions.begin_step(step)
        additions.loss_sum(model, IDS, IDS)
        additions.after_update()
        found.append(additions.metrics())
        additions.after_step(Between(step + 1, Path(), tell, 0.0, torch.zeros(())))
    return found


def small_model(kind: type[NSAModel] = NSAModel) -> NSAModel:
    torch.manual_seed(1)
    return kind(replace(NSA_SHAPES["m7c-showcase"], num_layers=3, vocab_size=64))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("layer", [None, 0, 1])
def test_one_collapsed_layer_of_a_real_model_is_an_alarm_and_a_fresh_model_is_none(layer: int | None) -> None:
    model = small_model()
    if layer is not None:
        with torch.no_grad():
            model.blocks[layer].attention.gate_out.bias[2] = 6.0  # type: ignore[union-attr,operator]
    rule = CollapsedGates()
    looks = enumerate(looked_at(model, 3), start=1)
    alarms = [list(rule.look(replace(STEP, step=step, values=values))) for step, values in looks]
    assert [len(found) for found in alarms] == [0, 0, 0 if layer is None else 1]
    if layer is not None:
        assert alarms[2][0].text == (
            f"the gates of layer {layer + 1} have collapsed: their entropy is 0.03 of 1.10, one branch gets 1.00 of "
            "the weight; over all layers most goes to 'window' (0.55)"
        )


@pytest.mark.usefixtures("one_thread")
def test_statistics_that_fail_are_told_once_and_never_end_a_training() -> None:
    class Full(NSAModel):
        def statistics(self, ids: Tensor) -> dict[str, float]:
            raise torch.OutOfMemoryError("no room for them\nand much more about it")

    told: list[str] = []
    assert looked_at(small_model(Full), 3, told.append) == [{}, {}, {}]
    assert told == [
        "gates and blocks are not looked at any more, the training continues: OutOfMemoryError: no room for them"
    ]


def test_the_plan_knows_that_kernels_take_no_square_of_the_sequence_and_plain_torch_does() -> None:
    gpu = find_gpu("H200")
    peaks = {}
    for is_on_gpu in (True, False):
        for seq_len in (2048, 8192):
            config = resolve("m7c", ["--model", "toy", "--tokenizer", "bytes", f"--seq-len={seq_len}"]).config
            job = job_of(config, shape_of(config, 257), "bf16-weights", is_on_gpu=is_on_gpu)
            peaks[is_on_gpu, seq_len] = predict(job, 1, gpu).peak_allocated_bytes
    assert peaks[True, 8192] < 5 * peaks[True, 2048]
    assert peaks[False, 8192] > 12 * peaks[False, 2048]


@pytest.mark.slow
def test_what_stands_for_the_turn_in_a_plan_keeps_what_the_turn_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("m7c", ["--model", "smoke", "--tokenizer", "bytes", "--seq-len=1024"]).config
    job = job_of(config, shape_of(config, 257), "bf16-weights")
    quick = predict(job, 2, find_gpu("H200")).peak_allocated_bytes
    monkeypatch.setattr(PlannedAttention, "_turn", SparseAttention._turn)
    assert quick == pytest.approx(predict(job, 2, find_gpu("H200")).peak_allocated_bytes, rel=0.005)


def test_the_plan_shows_the_parameters_there_are() -> None:
    shown = candidates(find_gpu("H200"), ["--seq-len", "4096"])[0].shown
    assert (shown["parameters"], shown["batch_size"], shown["precision"]) == (155_169_060, 16, "bf16-weights")
    shown = candidates(find_gpu("H200"), ["--config", "m7c_125m_fast_log", "--model", "toy"])[0].shown
    assert (shown["model"], shown["batch_size"]) == ("toy", 16)
    table = _all_sizes("jackline.recipes.m7c.recipe", find_gpu("T4"), [])  # for `plan --table`
    assert [candidate.job.name for candidate in table] == ["m7c 125m"]


def test_on_a_cpu_as_many_sequences_at_a_time_as_their_square_leaves_room_for() -> None:
    large, small = (resolve("m7c", words).config for words in ([], ["--quick"]))
    chosen = choose_micro_batch(large, NSAShape(), "fp32", is_on_gpu=False)
    square = "plain attention takes memory with the square of the sequence"
    assert (chosen.micro_batch, chosen.accumulation, chosen.text) == (1, 16, square)
    assert choose_micro_batch(small, NSAShape(), "fp32", is_on_gpu=False).micro_batch == small.batch_size == 8


@pytest.mark.slow
def test_the_doctor_tries_it_through_and_names_variables_nobody_reads(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_SEQ_LEN", "9")
    words = ("--quick", "--seq-len=40", "--batch-size=2", f"--data={corpus / 'text'}", f"--data-dir={tmp_path / 'd'}")
    told: list[Finding] = []
    with Console() as console:
        examine(resolve("m7c", words), Request("m7c", words, tmp_path / "runs"), console, told.append)
    states = {finding.name: finding.state for finding in told}
    assert states["environment"] == "note"
    assert "problem" not in states.values(), told
    assert {"device", "data", "context", "model", "memory", "step", "saving", "time"} <= set(states)
    texts = {finding.name: finding.text for finding in told}
    assert texts["environment"] == "$NSA_SEQ_LEN=9 is not read: --seq-len N"
    assert "all 14 weights get a gradient" in texts["step"]


def test_any_length_fits_a_model_that_turns_its_positions() -> None:
    finding = judge_context(65_536, None)
    assert (finding.state, finding.text) == (
        "ok",
        "seq_len=65536: the model turns its positions, so any length fits",
    )
    assert judge_context(2048, 1024).state == "problem"

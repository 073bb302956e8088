"""Data whose order follows what training does, that grow, or that nobody can position: the same again, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jackline.rundir.records.seen import NUM_ENTRIES, SeenBatch, SeenWriter, read_seen
from jackline.session.feeds.trail import Trail, checksum, first_difference
from tests.session.nursery import EVERY_SAVE, Nursery
from tests.session.test_attach import HEAD

LOOP = """
def show_batch(batch): print("seen", run.epoch, batch[0][:, 0].tolist(), flush=True)
def end_at(batch):
    if os.environ.get("DIE") and run.batch == batch:
        settle(); os.kill(os.getpid(), int(os.environ["DIE"]))
class Numbers(torch.utils.data.Dataset):
    count = 12
    def __len__(self): return self.count
    def __getitem__(self, index): return torch.full((4,), float(index)),
"""


def seen(output: str) -> list[str]:
    return re.findall(r"^seen .*$", output, re.M)


def run_all(nursery: Nursery, script: str, place: Path, number: int = 9) -> tuple[str, str, str, int]:
    """The outputs of a whole run, of one that was ended, and of its resume, with the exit code of the last."""
    (place / "whole").mkdir()
    whole = nursery.run(HEAD + LOOP + script, [], place / "whole")
    assert whole.code == 0, whole.output
    ended = nursery.run(HEAD + LOOP + script, [], place, {**EVERY_SAVE, "DIE": str(number)})
    assert ended.code == (75 if number == 15 else -9), ended.output
    again = nursery.run(HEAD + LOOP + script, [], place, {"DIE": ""})
    return whole.output, ended.output, again.output, again.code


GROWING = """
data = Numbers()
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for epoch in run.epochs(3):
        if GROWS_BEFORE: data.count = 12 * (epoch + 1)
        for batch in run.steps():
            show_batch(batch); train(batch); end_at(7)
        if not GROWS_BEFORE: data.count += 12
"""


def test_the_length_of_the_data_is_asked_for_in_each_epoch(nursery: Nursery, tmp_path: Path) -> None:
    """Every epoch had the 12 samples of the first one."""
    whole, ended, again, code = run_all(nursery, GROWING.replace("GROWS_BEFORE", "True"), tmp_path)
    samples = {epoch: re.findall(r"\d+\.0", "".join(x for x in seen(whole) if x[5] == epoch)) for epoch in "012"}
    assert [len(set(found)) for found in samples.values()] == [12, 24, 36]
    assert code == 0 and seen(ended)[:-1] + seen(again) == seen(whole), again  # a killed step is repeated
    assert "the data have 24 samples now, 12 in the epoch before. A resumed program must bring them" in whole


def test_data_that_have_not_grown_again_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    whole, _, again, code = run_all(nursery, GROWING.replace("GROWS_BEFORE", "False"), tmp_path)
    assert "the data have 24 samples now, 12 in the epoch before" in whole
    assert code != 0 and "error: the data have 12 samples now, and had 24 when they were saved" in again, again


SAMPLED = """
class Live:
    def __init__(self): self.weights, self.drawn = torch.ones(12), 0
    def __len__(self): return 12
    def __iter__(self):
        for _ in range(12):
            self.drawn += 1
            yield int(torch.multinomial(self.weights, 1))
sampler = SAMPLER
loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, sampler=sampler)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, on_change=CHANGE) as run:
    for epoch in run.epochs(3):
        for batch in run.steps():
            show_batch(batch); loss = train(batch)
            if run.epoch == 0: print("drawn", getattr(sampler, "drawn", 0) - 2 * (run.batch + 1))
            sampler.weights[run.batch % 12] += 5.0
            end_at(9)
"""


@pytest.mark.parametrize("number", [9, 15])
def test_weights_that_training_changes_come_back_with_the_sampler(
    number: int, nursery: Nursery, tmp_path: Path
) -> None:
    """The epoch after the resume was drawn from the weights of the start, with no word."""
    sampler = "torch.utils.data.WeightedRandomSampler(torch.ones(12), 12)"
    script = SAMPLED.replace("SAMPLER", sampler).replace("CHANGE", "{}")
    whole, ended, again, code = run_all(nursery, script, tmp_path, number)
    before = seen(ended)[:-1] if number == 9 else seen(ended)  # a killed step is repeated
    assert code == 0 and before + seen(again) == seen(whole), again


def test_a_sampler_that_draws_from_live_weights_is_named_and_refused(nursery: Nursery, tmp_path: Path) -> None:
    script = SAMPLED.replace("SAMPLER", "Live()").replace("CHANGE", "{}")
    whole, _, again, code = run_all(nursery, script, tmp_path)
    assert "a resume is refused if they depend on what training changes during an epoch" in whole.split("seen")[0]
    assert set(re.findall(r"^drawn .*$", whole, re.M)) == {"drawn 0"}  # no batch further ahead
    assert code != 0
    assert "error: the sampler Live does not give the same indices again: epoch 1 differs at batch " in again
    assert "on_change={'data': 'warn'} resumes with other data" in again


@pytest.mark.parametrize("verdict", ["warn", "go on"])
def test_on_change_holds_for_samplers_too(verdict: str, nursery: Nursery, tmp_path: Path) -> None:
    """The hint named a setting that changed nothing."""
    script = SAMPLED.replace("SAMPLER", "Live()").replace("CHANGE", repr({"data": verdict}))
    _, _, again, code = run_all(nursery, script, tmp_path)
    assert code == 0 and ("does not give the same indices again" in again) == (verdict == "warn"), again


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self): self.rng, self.items = random.Random(4), list(range(12))
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        ORDER
        for item in self.items[info.id :: info.num_workers] if info else self.items:
            yield torch.full((4,), float(item)),
loader = torch.utils.data.DataLoader(Stream(), batch_size=2, **OPTIONS)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for epoch in run.epochs(3):
        for batch in run.steps():
            show_batch(batch); train(batch); end_at(9)
"""
REPEATABLE = {
    "its own generator": ("self.rng.shuffle(self.items)", "{}"),
    "the global generator": ("random.shuffle(self.items)", "{}"),
    "a list that is turned": ("self.items[:] = self.items[5:] + self.items[:5]", "{}"),
    "persistent workers": ("self.rng.shuffle(self.items)", "dict(num_workers=1, persistent_workers=True)"),
    "a generator of the loader": (
        "random.shuffle(self.items)",
        "dict(num_workers=1, generator=torch.Generator().manual_seed(3))",
    ),
}


@pytest.mark.parametrize("name", list(REPEATABLE))
def test_a_stream_is_read_again_in_the_same_order(name: str, nursery: Nursery, tmp_path: Path) -> None:
    order, options = REPEATABLE[name]
    script = STREAM.replace("ORDER", order).replace("OPTIONS", options)
    whole, ended, again, code = run_all(nursery, script, tmp_path, 15)
    assert code == 0 and seen(ended) + seen(again) == seen(whole), again
    assert "a second pass over these data" not in whole


@pytest.mark.parametrize("options", ["{}", "dict(num_workers=1)"])
def test_a_stream_that_cannot_be_repeated_is_named_before_the_first_step(
    options: str, nursery: Nursery, tmp_path: Path
) -> None:
    script = STREAM.replace("ORDER", "random.Random(os.urandom(8)).shuffle(self.items)").replace("OPTIONS", options)
    whole, _, again, code = run_all(nursery, script, tmp_path, 15)
    assert "a second pass over these data gives other batches: after a kill" in whole.split("seen")[0]
    assert code != 0 and "error: the data are not the same again: in epoch 1, batch " in again, again


def test_a_stream_refuses_another_number_of_workers(nursery: Nursery, tmp_path: Path) -> None:
    script = STREAM.replace("ORDER", "").replace("OPTIONS", "dict(num_workers=int(os.environ.get('DIE') or 0) // 9)")
    whole, _, again, code = run_all(nursery, script, tmp_path)
    assert "a resume needs the same number of workers (0)" in whole.split("seen")[0]
    assert code != 0 and "error: the data were read by 1 workers and are read by 0 now: their batches come" in again


STATEFUL = """
class Own:
    def __init__(self): self.next, self.num_workers = 0, 1 if os.environ.get("DIE") else 2
    def __iter__(self):
        while self.next < 8: self.next += 1; yield torch.full((2, 4), float(self.next)),
        self.next = 0
    def state_dict(self): return {"next": self.next}
    def load_state_dict(self, state): assert False, "its own words"
with jackline.attach(model=model, optimizer=optimizer, loader=Own(), save_every_steps=1) as run:
    for batch in run.steps(total=20): train(batch); end_at(9)
"""


def test_a_loader_with_its_own_position_refuses_another_number_of_workers(nursery: Nursery, tmp_path: Path) -> None:
    """torchdata's own AssertionError was what a person saw."""
    whole, _, again, code = run_all(nursery, STATEFUL, tmp_path)
    assert "a resume needs the same number of workers (2)" in whole
    assert (
        code != 0 and "error: the data were read by 1 workers and are read by 2 now\nhint: set num_workers=1" in again
    )


NOISE = """
class Noise(Numbers):
    def __getitem__(self, index): return torch.full((4,), float(index) + NOISE),
loader = torch.utils.data.DataLoader(Noise(), batch_size=2, shuffle=True)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=4) as run:
    for batch in run.steps(total=20): train(batch); end_at(6)
"""


@pytest.mark.parametrize("noise", ["os.urandom(1)[0]", "random.random()"])
def test_batches_that_are_trained_on_again_are_compared(noise: str, nursery: Nursery, tmp_path: Path) -> None:
    _, _, again, code = run_all(nursery, NOISE.replace("NOISE", noise), tmp_path)
    words = "batch 4 of the run (counted from 0) is not the one that was trained on before: this resume is not exact"
    assert code == 0 and (words in again) == ("urandom" in noise), again
    events = next(tmp_path.glob("runs/*/events-0.jsonl")).read_text()
    assert ("the 3 batches that were read again are those recorded before" in events) == ("urandom" not in noise)


def test_a_trail_says_where_two_epochs_part_and_stays_small() -> None:
    one, other = Trail(), Trail()
    for number in range(20_000):
        one.add(number)
        other.add(number if number != 15_000 else 3)
    assert first_difference(one.state(), one) is None
    assert 15_001 <= (first_difference(one.state(), other) or 0) <= 15_004
    assert len(one.state()["marks"]) <= 8 * 8192
    assert one.state()["count"] == 20_000
    one.add(7)
    assert one.state(takes_back=True)["count"] == 20_000


def test_a_checksum_tells_batches_apart() -> None:
    import numpy
    import torch

    batch = {"x": torch.arange(6.0), "name": ["a", "b"], "n": numpy.arange(3), "half": torch.ones(2).bfloat16()}
    same = {word: part.clone() if isinstance(part, torch.Tensor) else part for word, part in batch.items()}
    assert checksum(batch) == checksum(same)
    for change in ({"x": torch.arange(6.0) + 1}, {"name": ["a", "c"]}, {"n": numpy.arange(4)}):
        assert checksum({**batch, **change}) != checksum(batch)
    assert checksum(object()) == checksum(object())


def test_the_record_of_batches_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "seen-0.bin"
    assert read_seen(path) == {}
    writer = SeenWriter(path)
    for number in range(NUM_ENTRIES + 5):
        writer.write(SeenBatch(number, number // 2, number * 7))
    writer.close()
    found = read_seen(path)
    assert sorted(found) == list(range(5, NUM_ENTRIES + 5)) and found[9] == SeenBatch(9, 4, 63)
    data = bytearray(path.read_bytes())
    data[9 * 20 + 3] ^= 1
    path.write_bytes(data[:-7])
    assert set(found) - set(read_seen(path)) == {9, NUM_ENTRIES - 1}

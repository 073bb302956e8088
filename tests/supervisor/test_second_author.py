"""Progress lines written by somebody who had not read the rules."""

from __future__ import annotations

from jackline.diagnosis.frames import Frame
from jackline.supervisor.hang.text import collective_of
from jackline.supervisor.hang.views import ProcessView
from jackline.supervisor.output.learned import Learner
from jackline.supervisor.output.lines import parse_line
from jackline.supervisor.output.numbers import read_numbers
from tests.supervisor.worlds import Proc


def test_a_word_that_begins_like_a_number_is_none() -> None:
    line = '{"ts": 1795034135.7, "level": "info", "update": 39, "total_updates": 400, "train/loss": 3.88}'
    assert read_numbers(line) == {"train/loss": 3.88}
    assert read_numbers("{'loss': nan, 'lr': '2e-05', 'mode': 'nano', 'day': '2026-11-18'}").keys() == {"loss", "lr"}


def test_the_total_of_a_record_is_named_after_its_counter() -> None:
    for text in ('{"update": 39, "total_updates": 400, "loss": 3.8}', '{"iter": 39, "max_iter": 400, "loss": 3.8}'):
        found = parse_line(text)
        assert found is not None
        assert (found.done, found.total) == (39, 400)


def test_the_steps_of_one_fold_are_not_those_of_the_run() -> None:
    found = parse_line("Fold 1: iteration 39 of 100 deviance = 3.8853")
    assert found is not None
    assert (found.phase, found.done, found.total, found.of) == ("fold 1", 39, 100, "part")
    plain = parse_line("seed 7, epoch 3/10, iteration 39 of 100 loss 3.8")
    assert plain is not None
    assert (plain.epoch, plain.epochs) == (3, 10)


def test_a_learned_counter_knows_its_total_in_other_languages() -> None:
    learner = Learner()
    found = [learner.take(f"Schritt {step} von 400: Verlust {5 / step:.4f}") for step in range(1, 5)][-1]
    assert found is not None
    assert found.progress is not None
    assert (found.progress.done, found.progress.total, found.progress.is_guessed) == (4, 400, True)


def test_importing_torch_distributed_is_not_waiting_for_other_ranks() -> None:
    folder = "/usr/lib/python3/site-packages/torch/distributed"
    imports = (Frame("get_data", "<frozen importlib>", 9), Frame("<module>", f"{folder}/tensor.py", 3))
    reduces = (
        Frame("all_reduce", f"{folder}/distributed_c10d.py", 9),
        Frame("wrapper", f"{folder}/c10d_logger.py", 3),
    )
    for inside, collective in ((imports, ""), (reduces, "all_reduce")):
        process = Proc(7, inside=inside)
        assert collective_of(ProcessView(process.reading(), 0.0, 0.0, process.stack())) == collective


def test_a_learned_counter_finds_its_total_by_name_and_a_percent_its_pace() -> None:
    learner = Learner()
    lines = [f'ts=9 level=info msg="train" it={step} max_it=400 lr=3e-4 ce={5 / step:.4f}' for step in range(1, 6)]
    found = [learner.take(line) for line in lines][-1]
    assert found is not None
    assert found.progress is not None
    assert (found.progress.done, found.progress.total) == (5, 400)
    for line, done in (("  {:5.2f}% complete, elapsed 0:01:00", 1.0), ("{:>6.0f}%  of the shards are packed", 1.0)):
        learner = Learner()
        found = [learner.take(line.format(share / 4)) for share in range(5)][-1]
        assert found is not None
        assert found.progress is not None
        assert (found.progress.done, found.progress.total, found.progress.unit) == (done, 100, "%")

"""`jackline wait`: what may be waited for, what is answered, how long the answer may be."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from jackline.cli.commands import status
from jackline.cli.programs.conditions import WORDS, Facts, find_met, parse_conditions
from jackline.cli.programs.numbers import MetricsTail
from jackline.cli.programs.verdict import SCHEMA
from jackline.cli.programs.wait import command, wait_for
from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import identify
from tests.deadline import HANGS_S
from tests.docs.json_reference import check_answer

GOLDEN = Path(__file__).parents[1] / "golden"


def met(texts: str, facts: Facts, first_attempt: int = 1) -> str | None:
    found = find_met(parse_conditions([texts]), facts, first_attempt=first_attempt)
    return found.text if found else None


@pytest.mark.parametrize(
    ("texts", "facts", "answer"),
    [
        ("ended,stuck", Facts("alive", 1, "PROGRESS", 5), None),
        ("ended,stuck", Facts("alive", 1, "STUCK", 5), "stuck"),
        ("ended,stuck", Facts("finished"), "ended"),
        ("ended", Facts("dead"), "ended"),
        ("finished", Facts("dead"), None),
        ("dead", Facts("dead"), "dead"),
        ("stopped", Facts("stopped"), "stopped"),
        ("suspect", Facts("alive", 1, "SUSPECT"), "suspect"),
        ("suspect", Facts("alive", 1, "STUCK"), "suspect"),
        ("paused", Facts("alive", 1, "PAUSED"), "paused"),
        ("restarted", Facts("alive", 1), None),
        ("restarted", Facts("alive", 2), "restarted"),
        ("step=6", Facts("alive", step=5), None),
        ("step=6", Facts("alive", step=7), "step=6"),
        ("step>=1_000", Facts("alive", step=1000), "step>=1_000"),
        ("epoch=2", Facts("alive", epoch=2), "epoch=2"),
        ("step=6", Facts("alive"), None),
        ("loss<2.5", Facts("alive", metrics={"loss": [2.6, 2.4, 2.7]}), "loss<2.5"),
        ("loss < 2.5", Facts("alive", metrics={"loss": [2.5]}), None),
        ("eval/acc>=0.9", Facts("alive", metrics={"eval/acc": [0.9]}), "eval/acc>=0.9"),
        ("nan", Facts("alive", metrics={"loss": [2.0, float("nan")]}), "nan"),
        ("nan", Facts("alive", metrics={"loss": [2.0]}), None),
        ("loss<2.5", Facts("alive", metrics={"loss": [float("nan")]}), None),
    ],
)
def test_a_condition_holds_or_not(texts: str, facts: Facts, answer: str | None) -> None:
    assert met(texts, facts) == answer


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (
            "stuk",
            f"error: --until does not know 'stuk'\n       words: {', '.join(WORDS)}\nhint: did you mean 'stuck'?",
        ),
        (
            "step=many",
            "error: --until step=many: 'many' is not a number\n"
            "hint: such as: --until 'ended,stuck,step=1000,loss<2.5'",
        ),
        (" , ", "error: --until names no condition\nhint: such as: --until 'ended,stuck,step=1000,loss<2.5'"),
    ],
)
def test_a_wrong_condition_is_named(texts: str, error: str) -> None:
    with pytest.raises(UsageError) as found:
        parse_conditions([texts])
    assert str(found.value) == error


@pytest.fixture
def live(tmp_path: Path) -> RunDir:
    """A run whose supervisor is this very process: alive for as long as the test is."""
    run = RunDir(tmp_path / "runs" / "live")
    shutil.copytree(GOLDEN / "format1-finished", run.path)
    shutil.rmtree(run.attempts)
    (run.attempts / "001").mkdir(parents=True)
    state = json.loads(run.supervisor_file.read_text())
    state.update(supervisor=asdict(identify(os.getpid())), is_finished=False, attempt=1)
    run.supervisor_file.write_text(json.dumps(state))
    return run


def test_a_value_between_two_looks_is_not_missed(live: RunDir) -> None:
    live.metrics(0).write_text('{"step":1,"at_s":1.0,"loss":3.0}\n')
    answers: list[dict[str, object]] = []

    def wait() -> None:
        answers.append(wait_for(live, parse_conditions(["loss<1"]), None)[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + HANGS_S
    while thread.is_alive():  # again and again: it may not have begun to look yet
        assert time.monotonic() < deadline_s
        with live.metrics(0).open("a") as file:
            file.write('{"step":2,"at_s":2.0,"loss":0.5}\n{"step":3,"at_s":3.0,"loss":4.0,"lr":"nan"}\n')
        thread.join(0.05)
    assert answers[0]["met"] == "loss<1"
    assert answers[0]["metrics"] == {"loss": 4.0, "lr": None}


def test_the_answer_is_bounded_whatever_the_run_logs(live: RunDir) -> None:
    numbers = {f"{'metric ' * 40}{number}": number / 3 for number in range(500)}
    live.metrics(0).write_text(json.dumps({"step": 1, "at_s": 1.0, **numbers}) + "\n")
    state = json.loads(live.supervisor_file.read_text())
    state["verdict"] = {"kind": "STUCK", "text": "\x1b[2J" + "long " * 10_000, "for_s": 1.0}
    live.supervisor_file.write_text(json.dumps(state))
    verdict, code = wait_for(live, parse_conditions(["ended"]), 0.0)
    assert code == 124
    assert len(json.dumps(verdict)) < 2000
    check_answer(SCHEMA, verdict)


def test_metrics_are_read_on_from_the_ends_of_the_files(live: RunDir) -> None:
    lines = "".join(json.dumps({"step": step, "loss": step}) + "\n" for step in range(10_000))
    live.metrics(0).write_text(lines)
    tail = MetricsTail(live)
    assert tail.latest == {"loss": 9999.0}
    assert tail.read() == {}
    live.metrics(1).write_text('{"step":1,"other":1}\n')
    assert tail.read() == {"other": [1.0]}


@pytest.mark.parametrize(
    ("name", "code", "state"),
    [
        ("format1-finished", 0, "finished"),
        ("format1-killed-oom", 1, "dead"),
        ("format1-alive-elsewhere", 5, "elsewhere"),
    ],
)
def test_a_run_that_is_over_is_answered_at_once(name: str, code: int, state: str) -> None:
    done = CliRunner().invoke(command, [str(GOLDEN / name)])
    assert done.exit_code == code
    answer = json.loads(done.stdout)
    check_answer(SCHEMA, answer)
    assert (answer["state"], answer["is_timeout"]) == (state, False)


def test_a_run_that_finished_before_the_condition_held_has_its_own_code() -> None:
    done = CliRunner().invoke(command, [str(GOLDEN / "format1-finished"), "--until", "loss<-1"])
    assert (done.exit_code, json.loads(done.stdout)["met"]) == (4, None)


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("format1-*")), ids=lambda path: path.name)
def test_status_as_json_has_the_documented_fields(folder: Path) -> None:
    done = CliRunner().invoke(status.command, [str(folder), "--json"])
    assert done.exit_code == 0
    check_answer(status.SCHEMA, json.loads(done.stdout))

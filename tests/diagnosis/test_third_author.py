"""Ends of programs that a third author wrote: what was first said about them left out what to do, or where."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackline.diagnosis.deaths.collect import with_sources
from tests.diagnosis.deaths import best, evidence, run_command, run_script, said


def raised(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "/w/load.py", line 6, in <module>\n    load(path)\n{error}'


@pytest.mark.parametrize(
    "error",
    [
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, not covered",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "_pickle.UnpicklingError: Weights only load failed. Please file an issue.\n\t\tUnsupported operand 118",
    ],
)
def test_a_file_that_holds_no_weights_is_looked_at(error: str) -> None:
    found = best(said(raised(error)))
    assert (found.cause, found.confidence) == ("own_exception", "certain")
    assert found.hint.startswith(
        "that file is no weights or not whole: a Git LFS pointer of 130 bytes (`git lfs pull`)"
    )


def test_a_type_that_may_not_be_loaded_is_another_matter() -> None:
    error = "_pickle.UnpicklingError: Weights only load failed. Unsupported operand 149"
    assert best(said(raised(error))).hint.startswith("if you trust the file: ")


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-19 16:18:33,674 CRITICAL watchdog: loss did not improve, terminating the job",
        "2026-11-19T16:18:33.674Z ERROR trainer: no data left",
        "[2026-11-19 16:18:33] [ERROR] no data left",
        "[16:18:33 ERROR] no data left",
        '{"ts": 1795, "level": "error", "msg": "no data left"}',
        "E1119 16:18:33.674 1234 loader.cc:12] no data left",
        "2026-11-19 16:18:33.674 | CRITICAL | trainer:fit:20 - no data left",
    ],
)
def test_a_line_of_a_logger_that_calls_itself_an_error_is_quoted_as_the_reason(line: str) -> None:
    found = best(said(f"step 19 loss 3.0\n{line}", exit_code=17))
    assert (found.cause, found.confidence) == ("exit_code", "likely")
    assert found.title == f"ended with exit code 17 after this line: {line}"


@pytest.mark.parametrize(
    "line", ["2026-11-19 16:18:33 INFO errors: 0", "step 3 ERROR rate 0.2", "12 errors fixed", "epoch: 3: done"]
)
def test_a_line_that_only_speaks_of_errors_is_no_reason(line: str) -> None:
    assert best(said(line, exit_code=17)).confidence == "not sure"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_line_of_a_shell_script_is_named(tmp_path: Path, shell: str) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("set -eu\n\naria2c-fast -x 16 http://127.0.0.1/\n")
    found = best(run_command([shell, str(script)], cwd=tmp_path))
    assert (found.cause, found.confidence) == ("command_not_found", "certain")
    assert found.title == "'aria2c-fast' was not found at launch.sh:3 (exit code 127)"
    script.write_text("set -eu\n\n: $NUM_GPUS\n")
    found = best(run_command([shell, str(script)], cwd=tmp_path))
    assert found.place is not None
    assert (found.cause, found.confidence, found.place.place) == ("exit_code", "likely", f"{script}:3")
    script.write_text("set -eu\n\n./train.bin\n")
    (tmp_path / "train.bin").touch(mode=0o600)
    found = best(run_command([shell, str(script)], cwd=tmp_path))
    assert found.title == "the command cannot be executed at launch.sh:3 (exit code 126)"


def test_the_frame_around_an_exception_group_is_no_last_line(tmp_path: Path) -> None:
    code = """
        import asyncio
        async def parse(): raise ValueError("bad record 37")
        async def main():
            async with asyncio.TaskGroup() as group:
                group.create_task(parse())
        asyncio.run(main())
    """
    found = best(run_script(tmp_path, code))
    assert found.title == "ValueError: bad record 37 (train.py:2)"
    assert not any("its last line" in line for line in found.detail)
    assert any(line.startswith("then: ExceptionGroup: ") for line in found.detail)


def test_what_was_printed_after_the_error_is_still_quoted() -> None:
    output = raised("ValueError: bad record") + "\ngoing on without it\n-----"
    assert "its last line: going on without it" in best(evidence(exit_code=1, output_tail=output.splitlines())).detail


def test_a_traceback_of_a_program_that_can_open_no_file_more_has_its_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def load():\n    return open('x')\nload()\n")
    frames = f'  File "{tmp_path}/train.py", line 3, in <module>\n{{}}  File "{tmp_path}/train.py", line 2, in load'
    bare = ("Traceback (most recent call last):", *frames.format("").splitlines(), "OSError: [Errno 24] Too many")
    found = best(evidence(exit_code=1, output_tail=with_sources(bare)))
    assert found.detail[0] == f"{tmp_path}/train.py:2 in load: return open('x')"
    known = ("Traceback (most recent call last):", *frames.format("    load()\n").splitlines(), "OSError: no")
    assert with_sources(known) == known


def test_a_program_that_was_not_linked_is_not_called_missing() -> None:
    line = "./trainer: symbol lookup error: ./trainer: undefined symbol: helper"
    found = best(said(f"starting\n{line}", exit_code=127))
    assert (found.cause, found.confidence, found.detail[0]) == ("import_error", "certain", line)
    assert found.title == "a library that ./trainer needs is of another version: a function is missing in it"
    line = (
        "./trainer: error while loading shared libraries: libcudnn.so.9: cannot open shared object file: No such file"
    )
    assert best(said(line, exit_code=127)).title == "the library libcudnn.so.9 is missing, which ./trainer needs"
    assert best(said("bye", exit_code=127)).confidence == "likely", "a program may choose that code itself"


def test_a_request_that_is_refused_while_hardly_any_memory_is_used_is_looked_at_itself() -> None:
    thrown = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    fault = "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n"
    fault += '  File "/w/index.py", line 7 in build\n'
    facts = {"exit_code": None, "signal": 6, "fault_text": fault}
    found = best(said(thrown, peak_memory_bytes=1 << 20, last_memory_bytes=0, **facts))
    assert found.title == "one request for memory was refused at index.py:7"
    assert found.hint.startswith(
        "hardly any memory was in use, so the size that was asked for is the thing to look at"
    )
    assert best(said(thrown, **facts)).title == "ran out of memory at index.py:7"

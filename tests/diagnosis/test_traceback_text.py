"""Tracebacks read back out of a log."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.diagnosis.deaths.traceback_text import fatal_chain, find_chains, traceback_hash
from tests.diagnosis.deaths import run_script


def lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def test_a_plain_traceback_gives_the_error_and_every_frame_with_its_source(tmp_path: Path) -> None:
    code = """
        def inner():
            raise ValueError("boo")

        def outer():
            inner()

        outer()
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None
    assert chain.root.first_line == "ValueError: boo"
    assert [(frame.function, frame.line, frame.source) for frame in chain.root.frames] == [
        ("<module>", 7, "outer()"),
        ("outer", 5, "inner()"),
        ("inner", 2, 'raise ValueError("boo")'),
    ]
    assert chain.root.place == chain.root.frames[-1]
    assert all(frame.is_user for frame in chain.root.frames)


def test_the_place_is_the_persons_line_and_not_the_library_it_called(tmp_path: Path) -> None:
    chain = fatal_chain(run_script(tmp_path, "import json\njson.loads('{')").output_tail)
    assert chain is not None and chain.root.place is not None
    assert (Path(chain.root.place.file).name, chain.root.place.line) == ("train.py", 2)
    assert not chain.root.frames[-1].is_user


def test_a_cause_given_by_raise_from_is_the_root(tmp_path: Path) -> None:
    code = """
        try:
            [][3]
        except IndexError as error:
            raise RuntimeError("the outer one") from error
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None
    assert [error.name for error in chain.errors] == ["IndexError", "RuntimeError"]
    assert chain.root.place is not None and chain.root.place.line == 2


def test_an_error_while_handling_another_is_not_the_root(tmp_path: Path) -> None:
    code = """
        try:
            {}["a"]
        finally:
            open("/nonexistent/log")
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None
    assert [error.name for error in chain.errors] == ["KeyError", "FileNotFoundError"]


def test_an_error_that_a_library_caught_is_placed_where_the_person_called_it(tmp_path: Path) -> None:
    chain = fatal_chain(
        run_script(tmp_path, "import urllib.request as r\nr.urlopen('http://127.0.0.1:9')").output_tail
    )
    assert chain is not None
    assert chain.root.name == "ConnectionRefusedError"
    assert chain.root.user_frame is None
    assert chain.root.place is not None and Path(chain.root.place.file).name == "train.py"


def test_the_error_of_a_pool_worker_is_the_root(tmp_path: Path) -> None:
    code = """
        import multiprocessing

        def work(number):
            raise ValueError("in the worker")

        if __name__ == "__main__":
            with multiprocessing.Pool(1) as pool:
                pool.map(work, [1])
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None
    assert chain.root.first_line == "ValueError: in the worker"
    assert chain.root.place is not None and chain.root.place.line == 4
    assert len(chain.errors) == 2


def test_the_error_of_a_futures_worker_is_the_root(tmp_path: Path) -> None:
    code = """
        from concurrent.futures import ProcessPoolExecutor

        def work(number):
            raise ValueError("in the worker")

        if __name__ == "__main__":
            with ProcessPoolExecutor(1) as pool:
                pool.submit(work, 1).result()
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None
    assert chain.root.place is not None and chain.root.place.line == 4


def test_the_traceback_quoted_by_a_data_loader_is_the_root() -> None:
    text = """
        Traceback (most recent call last):
          File "/home/me/train.py", line 9, in <module>
            for batch in loader:
          File "/venv/lib/python3.11/site-packages/torch/_utils.py", line 733, in reraise
            raise exception
        ValueError: Caught ValueError in DataLoader worker process 0.
        Original Traceback (most recent call last):
          File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
            data = fetcher.fetch(index)
          File "/home/me/data.py", line 31, in __getitem__
            raise ValueError("bad sample 7")
        ValueError: bad sample 7
    """
    chain = fatal_chain(lines(text))
    assert chain is not None
    assert chain.root.first_line == "ValueError: bad sample 7"
    assert chain.root.place is not None and chain.root.place.place == "/home/me/data.py:31"


def test_the_members_of_an_exception_group_come_before_the_group(tmp_path: Path) -> None:
    code = """
        def fail():
            raise KeyError("inside")

        try:
            fail()
        except KeyError as error:
            caught = error
        raise ExceptionGroup("two at once", [caught])
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None
    assert chain.root.first_line == "KeyError: 'inside'"
    assert chain.last.first_line == "ExceptionGroup: two at once (1 sub-exception)"


RANKS = """
    [rank1]: Traceback (most recent call last):
    [rank0]: Traceback (most recent call last):
    [rank1]:   File "/home/me/train.py", line 40, in <module>
    [rank0]:   File "/home/me/train.py", line 44, in <module>
    [rank1]:     step(batch)
    [rank0]:     dist.barrier()
    [rank1]: ValueError: rank 1 is wrong
    [rank0]: RuntimeError: [Rank 0]: connection closed by peer
    E1115 10:00:01.000000 7 elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 1 (pid: 9)
    Traceback (most recent call last):
      File "/venv/bin/torchrun", line 8, in <module>
        sys.exit(main())
      File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 277, in launch_agent
        raise ChildFailedError(
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    ============================================================
    train.py FAILED
"""


def test_ranks_that_print_into_one_another_are_read_apart_and_the_launcher_is_not_the_root() -> None:
    chains = find_chains(lines(RANKS))
    assert [chain.root.name for chain in chains] == ["ValueError", "RuntimeError", "ChildFailedError"]
    chain = fatal_chain(lines(RANKS))
    assert chain is not None
    assert chain.root.first_line == "ValueError: rank 1 is wrong"
    assert chain.root.place is not None and chain.root.place.source == "step(batch)"


def test_what_python_ignores_at_exit_is_not_what_ended_the_program() -> None:
    text = """
        Traceback (most recent call last):
          File "/home/me/train.py", line 3, in <module>
            raise ValueError("the real one")
        ValueError: the real one
        Exception ignored in: <function Bar.__del__ at 0x7f>
        Traceback (most recent call last):
          File "/home/me/bar.py", line 9, in __del__
            self.close()
        AttributeError: 'Bar' object has no attribute 'file'
    """
    chain = fatal_chain(lines(text))
    assert chain is not None and chain.root.first_line == "ValueError: the real one"


def test_workers_that_were_pulled_down_afterwards_are_not_what_ended_the_program() -> None:
    text = """
        Traceback (most recent call last):
          File "/home/me/train.py", line 3, in <module>
            raise ValueError("the real one")
        ValueError: the real one
        Process Process-1:
        Traceback (most recent call last):
          File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
            self.run()
        KeyboardInterrupt
    """
    chain = fatal_chain(lines(text))
    assert chain is not None and chain.root.first_line == "ValueError: the real one"


def test_a_script_that_does_not_parse_is_placed_without_a_traceback(tmp_path: Path) -> None:
    chain = fatal_chain(run_script(tmp_path, "x = 1\nif x = 2:\n    pass").output_tail)
    assert chain is not None and chain.root.place is not None
    assert chain.root.name == "SyntaxError"
    assert (Path(chain.root.place.file).name, chain.root.place.line) == ("train.py", 2)
    assert chain.root.place.source == "if x = 2:"


def test_a_boxed_traceback_of_rich_is_read(tmp_path: Path) -> None:
    code = """
        import rich.traceback
        rich.traceback.install(width=100)

        def main():
            raise ValueError("in a box")

        main()
    """
    chain = fatal_chain(run_script(tmp_path, code).output_tail)
    assert chain is not None and chain.root.place is not None
    assert chain.root.first_line == "ValueError: in a box"
    assert (Path(chain.root.place.file).name, chain.root.place.line) == ("train.py", 5)
    assert chain.root.place.source == 'raise ValueError("in a box")'


def test_other_lines_in_the_middle_of_a_traceback_are_passed_over() -> None:
    text = """
        Traceback (most recent call last):
          File "/home/me/train.py", line 3, in <module>
        50%|#####     | 5/10
            raise ValueError("boo")
        ValueError: boo
    """
    chain = fatal_chain(lines(text))
    assert chain is not None and chain.root.first_line == "ValueError: boo"


def test_a_message_of_several_lines_is_kept_whole() -> None:
    text = """
        Traceback (most recent call last):
          File "/home/me/train.py", line 3, in <module>
            loss.backward()
        RuntimeError: CUDA error: device-side assert triggered
        CUDA kernel errors might be asynchronously reported at some other API call.

        unrelated
    """
    chain = fatal_chain(lines(text))
    assert chain is not None
    assert chain.root.message.splitlines() == [
        "CUDA error: device-side assert triggered",
        "CUDA kernel errors might be asynchronously reported at some other API call.",
    ]


def test_a_traceback_whose_end_is_missing_is_no_traceback() -> None:
    assert fatal_chain(lines('Traceback (most recent call last):\n  File "/home/me/a.py", line 3, in f')) is None


def test_the_hash_is_the_same_for_the_same_place_and_differs_for_another(tmp_path: Path) -> None:
    code = "import os\nraise ValueError(f'pid {os.getpid()}')"
    first = traceback_hash(run_script(tmp_path, code).output_tail)
    again = traceback_hash(run_script(tmp_path, code).output_tail)
    moved = traceback_hash(run_script(tmp_path, "\n" + code.replace("import os", "import os, sys\n")).output_tail)
    assert first and first == again and first != moved


def test_without_a_traceback_there_is_no_hash() -> None:
    assert traceback_hash(("all is well",)) == ""


PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        "[rank0]: Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
        "╭──── Traceback (most recent call last) ────╮",
        '  File "/home/me/a.py", line 3, in f',
        "    x = 1",
        "ValueError: boo",
        "SyntaxError: invalid syntax",
        "",
        "The above exception was the direct cause of the following exception:",
        "multiprocessing.pool.RemoteTraceback: ",
        '"""',
        "  | x",
    ]
)


@given(st.lists(PIECES | st.text(max_size=30), max_size=30))
def test_no_text_makes_the_reader_fail(text: list[str]) -> None:
    for chain in find_chains(text):
        assert chain.root.first_line or chain.root.frames or chain.root.message == ""
    assert isinstance(traceback_hash(text), str)


@pytest.mark.parametrize(
    ("path", "is_theirs"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("<string>", True),
        ("<stdin>", True),
        ("<frozen importlib._bootstrap>", False),
        ("<__array_function__ internals>", False),
        ("/usr/lib/python3.11/json/decoder.py", False),
        ("/opt/conda/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("/usr/lib/python311.zip/json/decoder.py", False),
        ("/home/me/lib/python_tricks/a.py", True),
        ("/home/me/src/jackline/supervisor/supervise.py", False),
        ("/home/me/jackline/train.py", True),
        ("pyarrow/error.pxi", False),
        ("numpy/random/mtrand.pyx", False),
        ("/home/me/fast/walks.pyx", True),
        ("walks.pyx", True),
    ],
)
def test_whose_file_it_is(path: str, is_theirs: bool) -> None:
    from jackline.diagnosis.user_code import is_user_file

    assert is_user_file(path) is is_theirs

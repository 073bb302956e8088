"""What a process notes while it ends, and what is told of it: real scripts with the injected file, to their end."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.diagnosis.deaths.collect import dumped_pids, read_fault_text
from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.left.last_words import find_bindings, find_raise, measure_rights, read_last_words
from jackline.diagnosis.deaths.signal import fault_place
from jackline.supervisor.child.environment import child_environment
from tests.deadline import HANGS_S
from tests.diagnosis.deaths import evidence, said

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def end_of(folder: Path, code: str, *arguments: str, **facts: Any) -> Evidence:
    """Run train.py under the injected file, and gather as the supervisor does."""
    stacks = folder / "stacks"
    stacks.mkdir()
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code).strip("\n") + "\n")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JACKLINE"))}
    env = child_environment(plain, stacks=stacks, inject=True, stdbuf=None, surface_is_terminal=False, columns=80)
    argv = [sys.executable, str(script), *arguments]
    with subprocess.Popen(
        argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        output = process.communicate(timeout=HANGS_S)[0].decode("utf-8", "replace")
    code_, lines = process.returncode, tuple(output.splitlines())
    fault = read_fault_text(stacks, dumped_pids(stacks))
    words = read_last_words(stacks, process.pid, code_)
    known = {
        "exit_code": code_ if code_ >= 0 else None,
        "signal": -code_ if code_ < 0 else None,
        "output_tail": lines,
        "fault_text": fault,
        "last_words": words or find_raise(argv, str(folder), code_),
        "rights": measure_rights(lines, words, str(folder)),
        "bindings": find_bindings(fault_place(fault)),
    }
    return Evidence.from_json(json.loads(json.dumps(evidence(**{**known, **facts}).to_json())))


def told(found: Evidence) -> Finding:
    return diagnose(found)[0]


# -- where it was left ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leave", "code", "how"),
    [
        ("sys.exit(3)", 3, "sys.exit"),
        ("exit(3)", 3, "exit"),
        ("quit(code=3)", 3, "exit"),
        ("os._exit(3)", 3, "os._exit"),
        ("raise SystemExit(3)", 3, "raise SystemExit"),
        ('raise SystemExit("the gate is closed")', 1, "raise SystemExit"),
    ],
)
def test_the_line_that_chose_the_exit_code_is_told(leave: str, code: int, how: str, tmp_path: Path) -> None:
    script = f"import os, sys\ndef gate():\n    {leave}\nprint('evaluated')\ngate()"
    found = told(end_of(tmp_path, script))
    assert found.title.startswith(f"ended with exit code {code} by {how} at train.py:3")
    assert found.detail[0] == f"{tmp_path}/train.py:3 in gate: {leave}"
    assert found.confidence != "certain"  # why it chose that is not known


def test_a_logged_reason_and_the_line_that_left_stand_together(tmp_path: Path) -> None:
    found = told(
        end_of(
            tmp_path,
            """
            import logging, sys
            logging.basicConfig(format="%(levelname)s:%(message)s")
            class Gate:
                def __exit__(self, *problem):
                    logging.error("accuracy 0.87 is below 0.89")
                    sys.exit(3)
                def __enter__(self):
                    return self
            with Gate():
                pass
            """,
        )
    )
    assert found.title == (
        "ended with exit code 3 by sys.exit at train.py:6 after this line: ERROR:accuracy 0.87 is below 0.89"
    )


def test_an_exit_while_an_exception_is_handled_names_both_lines(tmp_path: Path) -> None:
    found = told(
        end_of(
            tmp_path,
            """
            import sys
            def parse(text):
                return int(text)
            try:
                parse("many")
            except ValueError:
                print("bad settings")
                sys.exit(4)
            """,
        )
    )
    assert found.title.startswith("ended with exit code 4 by sys.exit at train.py:8")
    assert "while it handled ValueError, raised at train.py:3" in found.detail


def test_argparse_s_exit_is_placed_where_the_arguments_are_parsed(tmp_path: Path) -> None:
    code = "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args()"
    found = told(end_of(tmp_path, code, "--lr", "3"))
    assert found.title == "train.py did not accept its arguments: unrecognized arguments: --lr 3"
    assert (found.confidence, found.place and found.place.line) == ("certain", 3)


def test_an_exit_that_was_caught_explains_no_later_one(tmp_path: Path) -> None:
    code = """
    import sys
    def leave(number):
        raise SystemExit(number)
    try:
        sys.exit(4)
    except SystemExit:
        pass
    leave(5)
    """
    found = told(end_of(tmp_path, code))
    assert found.title.startswith("ended with exit code 5 by raise SystemExit at train.py:3")


def test_two_lines_that_may_have_raised_it_are_not_chosen_between(tmp_path: Path) -> None:
    code = "import os\nif os.getpid() == 1:\n    raise SystemExit(5)\nraise SystemExit(5)"
    found = told(end_of(tmp_path, code))
    assert (found.place, found.confidence) == (None, "not sure")


def test_a_child_that_left_is_not_taken_for_the_command(tmp_path: Path) -> None:
    code = """
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "import sys; sys.exit(5)"])
    sys.exit(6)
    """
    assert told(end_of(tmp_path, code)).title.startswith("ended with exit code 6 by sys.exit at train.py:3")


def test_the_error_of_a_rank_is_read_from_its_own_note_and_not_from_the_launcher_s(tmp_path: Path) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "launcher.py").write_text(
        "import subprocess, sys\nclass ChildFailedError(Exception): pass\n"
        "def launch(command):\n    if subprocess.call(command):\n        raise ChildFailedError('rank 0')\n"
        "launch([sys.executable, sys.argv[1], 'rank'])\n"
    )
    (tmp_path / "records.jsonl").write_text('{"text": "a"}\n{"text": ')
    code = """
    import json, os, sys
    if sys.argv[1:] != ["rank"]:
        os.execv(sys.executable, [sys.executable, os.path.abspath("site-packages/launcher.py"), __file__])
    for line in open("records.jsonl"):
        json.loads(line)
    """
    found = told(end_of(tmp_path, code))
    assert found.title.endswith(", in line 2 of records.jsonl"), found


UNCHANGED = """
import copy, os, pickle, sys, traceback
try:
    sys.exit(4)
except SystemExit as left:
    traceback.print_exc()
    print(left.code, len(traceback.extract_tb(left.__traceback__)))
assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit and copy.copy(os._exit) is os._exit
try:
    exit("words")
except SystemExit as left:
    print(left.code, traceback.extract_tb(left.__traceback__)[0].lineno)
try:
    sys.exit(1, 2)
except TypeError as error:
    print(error)
pid = os.fork()
if pid == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sys.exit.__name__, os._exit.__module__)
os._exit(status=9)
"""


def test_leaving_looks_the_same_as_without_us(tmp_path: Path) -> None:
    found = end_of(tmp_path, UNCHANGED)
    bare = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, timeout=HANGS_S)
    assert found.exit_code == bare.returncode == 9
    assert sorted(line.replace(f"{tmp_path}/", "") for line in found.output_tail) == sorted(
        (bare.stdout + bare.stderr).decode().replace(f"{tmp_path}/", "").splitlines()
    )


# -- a path that may not be used ------------------------------------------------------------------------------------

AS_NOBODY = "import os, pathlib\nos.setegid(65534)\nos.seteuid(65534)\n"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that everybody may enter: pytest's are root's alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@AS_ROOT
def test_a_folder_of_another_user_is_named_with_its_owner_and_who_we_were(open_path: Path) -> None:
    (open_path / "shared").mkdir(mode=0o755)
    found = told(end_of(open_path, f"{AS_NOBODY}open('{open_path}/shared/epoch_0.pt', 'wb')"))
    assert (found.cause, found.confidence) == ("own_exception", "certain")
    assert found.detail[1].startswith(
        f"it does not exist yet; its folder {open_path}/shared belongs to root (uid 0) with mode 0755; "
        "the process was nobody (uid 65534)"
    )
    assert found.hint == (
        f"save to a folder that user nobody may write, or let it in: sudo chown nobody {open_path}/shared"
    )


@AS_ROOT
def test_a_file_that_may_not_be_read_and_a_closed_folder_are_told_apart(open_path: Path) -> None:
    (open_path / "one").mkdir()
    (open_path / "two").mkdir()
    (open_path / "secret.yaml").touch(mode=0o600)
    (open_path / "closed").mkdir(mode=0o700)
    code = f"{AS_NOBODY}pathlib.Path('{open_path}/secret.yaml').read_text()"
    found = told(end_of(open_path / "one", code))
    assert found.detail[1] == ("it belongs to root (uid 0) with mode 0600; the process was nobody (uid 65534)"), (
        found.detail
    )
    assert found.hint.startswith("user nobody may not read or write it")
    code = f"{AS_NOBODY}os.makedirs('{open_path}/closed/run/ckpt')"
    found = told(end_of(open_path / "two", code))
    assert found.detail[1].startswith(f"the folder {open_path}/closed belongs to root (uid 0) with mode 0700 and may")


def test_a_program_that_is_not_executable_gets_the_command_for_that(tmp_path: Path) -> None:
    (tmp_path / "prepare.sh").write_text("#!/bin/sh\n")
    found = told(end_of(tmp_path, f"import subprocess\nsubprocess.run(['{tmp_path}/prepare.sh'])"))
    assert f"make it executable: chmod +x {tmp_path}/prepare.sh" in found.hint


# -- a file that cannot be read -------------------------------------------------------------------------------------

RECORDS = "".join(f'{{"prompt": "q{number}"}}\n' for number in range(40))


@pytest.mark.parametrize(
    "code",
    [
        "import json\nfor line in open('{file}'):\n    json.loads(line)",
        "import json, pathlib\nrows = [json.loads(row) for row in pathlib.Path('{file}').read_text().splitlines()]",
        "import json\nclass Data:\n    def __init__(self, path):\n        self.path = path\n"
        "    def __iter__(self):\n        with open(self.path, 'rb') as raw:\n"
        "            yield from map(json.loads, raw)\nlist(Data('{file}'))",
    ],
)
def test_the_record_that_is_no_json_is_named_with_its_file(code: str, tmp_path: Path) -> None:
    file = tmp_path / "instruct.jsonl"
    file.write_text(f'{RECORDS}{{"prompt": "cut o\n{RECORDS}')
    found = told(end_of(tmp_path, code.format(file=file)))
    assert found.title.endswith(", in line 41 of instruct.jsonl"), found
    assert re.match(rf"the text that it could not read is in line 41, column \d+ of {file}$", found.detail[1])
    assert found.hint.startswith(f"look at that line: sed -n 41p {file} | cut -c 1-300")


def test_a_whole_json_file_is_told_as_such_and_an_empty_one_too(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{\n  "lr": 3e-4,\n  "steps": ,\n}\n')
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    code = f"import json\nname = '{tmp_path}/settings.json'\nwith open(name) as file:\n    json.load(file)"
    found = told(end_of(tmp_path / "a", code))
    assert found.title.endswith(", in settings.json")
    assert f"all of {tmp_path}/settings.json; the error is in line 3, column 12" in found.detail[1]
    (tmp_path / "settings.json").write_text("")
    found = told(end_of(tmp_path / "b", code))
    assert found.title.endswith(": settings.json is empty")


def test_a_record_that_others_begin_with_is_not_mixed_up_with_them(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"a": 1, "b": 2}\n  {"a": 1,\r\n{"a": 1, "b": 3}\n')
    found = told(end_of(tmp_path, "import json\nfor pair in open('pairs.jsonl'):\n    json.loads(pair)"))
    assert found.title.endswith(", in line 2 of pairs.jsonl")


def test_a_text_that_is_in_no_file_names_none(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    code = (
        f"import json\nother = '{tmp_path}/other.json'\ndef ask(reply):\n    return json.loads(reply)\nask('<html>')"
    )
    found = told(end_of(tmp_path, code))
    assert "other.json" not in f"{found.title} {found.detail} {found.hint}"
    assert found.hint.startswith("the message counts inside that one text: ")


@pytest.mark.parametrize("ask", ["json.loads('')", "b'\\xe9'.decode()"])
def test_a_few_bytes_prove_no_file_that_was_not_open(ask: str, tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    found = told(end_of(tmp_path, f"import json\nnames = 'empty.json', 'latin.txt'\nfirst, second = names\n{ask}"))
    assert not {"empty.json", "latin.txt"} & set(re.split(r"[ /:]", " ".join((found.title, *found.detail[1:]))))


def test_a_byte_that_is_no_utf_8_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"a line of text\n" * 3000 + b"caf\xe9\n" + b"more\n" * 9)
    found = told(end_of(tmp_path, f"lines = 0\nfor line in open('{file}', encoding='utf-8'):\n    lines += 1"))
    assert found.title.endswith(", in line 3001 of corpus.txt")
    assert f"its bytes are in line 3001, column 4 of {file}" in found.detail


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cache.pkl", "import pickle\nwith open('{file}', 'rb') as cache:\n    pickle.load(cache)"),
        ("shard.zip", "import zipfile\narchive = zipfile.ZipFile('{file}')"),
        ("shard.tar", "import tarfile\nfrom pathlib import Path\ntarfile.open(Path('{file}'))"),
        ("shard.gz", "import gzip\nfor line in gzip.open('{file}', 'rt'):\n    print(line)"),
        ("w.safetensors", "from safetensors import safe_open\nsafe_open('{file}', framework='numpy')"),
    ],
)
def test_a_damaged_archive_or_pickle_is_named(name: str, code: str, tmp_path: Path) -> None:
    if "safetensors" in code:
        pytest.importorskip("safetensors")
    file = tmp_path / name
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    found = told(end_of(tmp_path, code.format(file=file)))
    lines = [line for line in found.detail if line.startswith(("it was reading ", "the code there names"))]
    assert str(file) in lines[0]


def test_a_cell_that_is_no_number_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("id,age\n1,30\n2,thirty\n3,31\n")
    code = f"""
    import csv
    with open('{file}') as source:
        reader = csv.DictReader(source)
        ages = [float(row['age']) for row in reader]
    """
    found = told(end_of(tmp_path, code))
    assert f"it was reading {file}, which a csv reader had read to line 3" in found.detail


# -- a pipe without a reader ----------------------------------------------------------------------------------------

INDEXER = "import sys; [sys.exit('indexer: schema mismatch') for n, line in enumerate(sys.stdin) if n == 3]"


@pytest.mark.parametrize(
    "write",
    [
        "child.stdin.write(b'x' * 99 + b'\\n'); child.stdin.flush()",
        "os.write(child.stdin.fileno(), b'x' * 99 + b'\\n')",
        "print('x' * 99, file=text, flush=True)",
    ],
)
def test_a_child_that_ended_while_it_was_written_to_is_named_with_its_end(write: str, tmp_path: Path) -> None:
    code = f"""
    import io, os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "{INDEXER}"], stdin=subprocess.PIPE, bufsize=0)
    text = io.TextIOWrapper(child.stdin)
    for number in range(1000000):
        if number % 3 == 0 and number < 9:
            print("exported", number, flush=True)
        {write}
    """
    found = told(end_of(tmp_path, code))
    assert ": its child python" in found.title, found
    assert found.title.endswith("had ended with exit code 1")
    assert "perhaps its last words: indexer: schema mismatch" in found.detail
    assert found.confidence == "certain"


def test_a_child_that_was_killed_is_told_by_its_signal(tmp_path: Path) -> None:
    code = """
    import subprocess
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as sink:
        sink.kill()
        sink.wait()
        sink.stdin.write(b"x" * 100000)
    """
    found = told(end_of(tmp_path, code))
    assert "its child cat" in found.title + " ".join(found.detail)
    assert "had been ended by SIGKILL" in found.title + " ".join(found.detail)


@pytest.mark.parametrize(
    ("end", "how"),
    [("sys.exit(5)", "ended with exit code 5"), ("os.kill(os.getpid(), 9)", "was killed with SIGKILL")],
)
def test_a_worker_of_multiprocessing_behind_a_broken_pipe_is_named_with_its_end(
    end: str, how: str, tmp_path: Path
) -> None:
    code = f"""
    import multiprocessing, os, sys
    def serve(near, far):
        far.close()
        near.recv()
        {end}
    if __name__ == "__main__":
        near, far = multiprocessing.Pipe()
        scorer = multiprocessing.get_context("fork").Process(target=serve, args=(near, far), name="scorer")
        scorer.start()
        near.close()
        while True:
            far.send([0.0] * 100)
    """
    found = told(end_of(tmp_path, code))
    assert (found.cause, found.confidence) == ("worker_killed", "likely")
    assert re.fullmatch(rf"the process 'scorer' \(pid \d+\) {how}, and the run ended with it", found.title)


def test_its_own_output_that_nobody_reads_is_told_apart(tmp_path: Path) -> None:
    code = """
    import os
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    print("step 1")
    """
    found = told(end_of(tmp_path, code))
    assert "nobody reads its stdout any more" in found.detail
    assert (found.confidence, found.hint.partition(":")[0]) == (
        "certain",
        "the program that read its output ended first",
    )


def test_a_broken_pipe_of_which_nothing_more_is_known_is_not_certain() -> None:
    found = told(
        said(
            """
            Traceback (most recent call last):
              File "/w/train.py", line 6, in export
                sink.write(row)
            BrokenPipeError: [Errno 32] Broken pipe
            """
        )
    )
    assert found.confidence == "likely"
    assert found.hint.startswith("whoever read the other end ended first: a child that it writes to")


# -- a crash in C ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "crash",
    [
        "import ctypes\nctypes.string_at(0)",
        "import ctypes\nclass Table:\n    address = 8\n    def at(self, number):\n"
        "        return ctypes.c_int64.from_address(self.address + 8 * number).value\nTable().at(1)",
        "from ctypes import CDLL\nlibrary = CDLL(None)\nlibrary.strlen(1)",
    ],
)
def test_a_crash_through_ctypes_is_the_scripts_own_matter(crash: str, tmp_path: Path) -> None:
    found = told(end_of(tmp_path, crash))
    assert (found.cause, found.confidence) == ("segfault", "certain")
    assert found.hint.startswith("that line calls C through ctypes: look at the address it passes (null, freed), ")


def crashed_at(*frames: str, modules: str = "") -> Finding:
    stack = "\n".join(f"  File {frame}" for frame in frames)
    text = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n{stack}\n"
    return told(
        evidence(signal=11, fault_text=f"{text}\nExtension modules: {modules} (total: 2)" if modules else text)
    )


def test_the_package_whose_c_code_crashed_is_named_from_the_innermost_frame() -> None:
    found = crashed_at(
        '"/env/lib/python3.11/site-packages/faiss/swigfaiss.py", line 90 in search', '"/w/train.py", line 3 in step'
    )
    assert found.hint.startswith("the C code is called by faiss: update or pin faiss")
    found = crashed_at('"/w/train.py", line 3 in step', modules="sentencepiece._C, numpy.core.multiarray")
    assert found.hint.startswith("the call at that line enters C code, of one of sentencepiece, numpy: ")


def test_a_dying_process_touches_no_file_on_a_mount_of_fuse(tmp_path: Path) -> None:
    """Its server may be gone, and then every look at a path waits for ever."""
    folder = tmp_path / "far"
    folder.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("this machine has no /dev/fuse, so no mount can be made that hangs")
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"stuck", bytes(folder), b"fuse", 0, options) != 0:
        os.close(fd)
        pytest.skip("this process may not mount anything")
    try:
        (tmp_path / "bad.json").write_text('{"rows": [1, 2, 3, "four and five"')
        text = f"import json\npath = {str(folder / 'rows.json')!r}\nnear = 'bad.json'\njson.load(open(near))\n"
        (tmp_path / "dies.py").write_text(text)
        line = [sys.executable, "-m", "jackline", "run", "--name", "a", "--", sys.executable, "dies.py"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
        assert done.returncode == 1 and "(dies.py:4), in bad.json" in done.stderr, done.stderr
    finally:
        os.close(fd)  # everybody who waits is released
        libc.umount2(bytes(folder), 2)

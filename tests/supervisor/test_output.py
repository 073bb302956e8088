"""The child's raw file becomes out.log and progress, exactly once, on any disk."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import read_series
from jackline.supervisor.output import reader as output
from jackline.supervisor.output.reader import LogWriter, OutputTail, begin_output, make_reserve, release_reserve
from jackline.supervisor.output.room import Space, first_data, low_bytes, shortage
from jackline.supervisor.output.told import Told
from tests.deadline import HANGS_S
from tests.places import fill_bytes

NOW_S = 1794708819.17
STAMP = "2026-11-15T02:13:39.1Z "
MIB = 1 << 20
ROOMY = Space(100 << 30, 200 << 30)


class Attempt:
    """One attempt's raw file, as the child sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attempts" / "001"
        self.folder.mkdir(parents=True)
        self.raw = self.folder / "raw.out"
        self.log_path = folder / "out.log"
        self.log = LogWriter(self.log_path)
        self.tail = OutputTail(self.raw, self.log)

    def print(self, data: bytes) -> None:
        with open(self.raw, "ab") as file:
            file.write(data)

    def texts(self) -> list[str]:
        """The log's lines without their stamps; each must have one."""
        lines = self.log_path.read_text().split("\n")
        assert lines.pop() == "", "the log ends within a line"
        assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\dZ ", line) for line in lines)
        return [line[len(STAMP) :] for line in lines]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


def test_lines_get_a_stamp_each_and_are_reported(attempt: Attempt) -> None:
    attempt.print(b"one\ntwo\nthr")
    news = attempt.tail.poll(NOW_S)
    assert attempt.log_path.read_text() == f"{STAMP}one\n{STAMP}two\n"
    assert (news.num_bytes, news.lines, news.num_lines, news.last_text) == (11, ("one", "two"), 2, "thr")
    assert attempt.tail.consumed_bytes == 8
    attempt.print(b"ee\n")
    assert attempt.tail.poll(NOW_S).lines == ("three",)
    assert attempt.tail.problem == ""


def test_a_silent_command_costs_one_look_at_the_disk_a_second(attempt: Attempt) -> None:
    looks: list[int] = []

    def space(fd: int) -> Space:
        looks.append(fd)
        return ROOMY

    tail = OutputTail(attempt.raw, attempt.log, read_space_of=space)
    attempt.print(b"one\n")
    for tick in range(20):
        tail.poll(NOW_S + 0.2 * tick)
    assert len(looks) <= 6
    attempt.print(b"two\n")
    assert tail.poll(NOW_S + 3.9).lines == ("two",), "a line is read at the next tick, however quiet it was before"


def test_a_raw_file_that_is_not_there_yet_is_no_news(attempt: Attempt) -> None:
    news = attempt.tail.poll(NOW_S)
    assert (news, attempt.tail.problem) == (output.OutputNews(), "")


def test_closing_keeps_a_last_line_without_newline(attempt: Attempt) -> None:
    attempt.print(b"one\nlast words")
    attempt.tail.poll(NOW_S)
    attempt.tail.close()
    assert attempt.texts() == ["one", "last words"]
    assert attempt.tail.consumed_bytes == attempt.raw.stat().st_size


def test_closing_reads_what_no_poll_had_time_for(attempt: Attempt) -> None:
    attempt.print(b"line\n" * 200_000)
    attempt.tail.close()
    assert len(attempt.texts()) == 200_000


def test_a_million_lines_are_all_kept_in_order(attempt: Attempt) -> None:
    attempt.print(b"".join(b"%d\n" % number for number in range(1_000_000)))
    num_lines = 0
    while news := attempt.tail.poll(NOW_S):
        num_lines += news.num_lines
        assert len(news.lines) <= 200
        if not news.num_bytes:
            break
    assert num_lines == 1_000_000
    assert attempt.texts() == [str(number) for number in range(1_000_000)]


def test_a_hundred_megabyte_line_is_kept_in_little_memory(attempt: Attempt) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open(attempt.raw, "ab") as file:
        for _ in range(100):
            file.write(b"x" * MIB)
    attempt.tail.close()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    total = 0
    with open(attempt.log_path, "rb") as file:
        total = sum(block.count(b"x") for block in iter(lambda: file.read(MIB), b""))
    assert total == 100 * MIB
    assert grown_mib < 40


def test_our_own_lines_are_marked(attempt: Attempt) -> None:
    attempt.log.note("memory is short", NOW_S)
    assert attempt.log_path.read_text() == f"{STAMP}[jackline] memory is short\n"


def test_the_second_stream_is_marked(attempt: Attempt) -> None:
    raw_err = attempt.folder / "raw.err"
    raw_err.write_bytes(b"oh no\n")
    OutputTail(raw_err, attempt.log, stream="err").poll(NOW_S)
    assert attempt.texts() == ["err| oh no"]


# -- bars ----------------------------------------------------------------------------------------------------------


def bar(percent: int) -> bytes:
    return b"\r%3d%%|%-10s| %d/1000 [00:12<00:15, 36.1it/s]" % (percent, b"#" * (percent // 10), percent * 10)


def test_a_bar_leaves_a_line_per_tenth_and_its_last_state(attempt: Attempt) -> None:
    for percent in range(68):
        attempt.print(bar(percent))
        attempt.tail.poll(NOW_S + percent / 10)
    attempt.tail.close()
    percents = [int(text.split("%")[0]) for text in attempt.texts()]
    assert percents == [0, 10, 20, 30, 40, 50, 60, 67]


def test_a_slow_bar_leaves_a_line_every_thirty_seconds(attempt: Attempt) -> None:
    for second in range(100):
        attempt.print(b"\rcopying, %d files" % second)
        attempt.tail.poll(NOW_S + second)
    assert [int(text.split()[1]) for text in attempt.texts()] == [0, 30, 60, 90]


def test_a_bar_that_ended_is_in_the_log_once(attempt: Attempt) -> None:
    attempt.print(bar(0) + bar(100) + bar(100) + b"\nnext\n")
    attempt.tail.poll(NOW_S)
    attempt.tail.close()
    texts = attempt.texts()
    assert [text.split("|")[0].strip() for text in texts] == ["0%", "100%", "next"]


def test_a_bar_nobody_redraws_any_more_shows_its_last_state(attempt: Attempt) -> None:
    attempt.print(bar(3) + bar(4) + bar(5) + b"\r")
    attempt.print(b"\r")
    attempt.print(b"printed by another\n")
    attempt.tail.poll(NOW_S)
    attempt.tail.poll(NOW_S + 31)
    assert [text.split("|")[0].strip() for text in attempt.texts()] == ["3%", "printed by another", "5%"]


def test_the_newest_state_of_a_bar_is_progress_though_no_line_end_came(attempt: Attempt) -> None:
    attempt.print(bar(44) + bar(45))
    news = attempt.tail.poll(NOW_S)
    assert news.progress is not None
    assert (news.progress.done, news.progress.total, news.progress.source) == (450, 1000, "bar")
    assert news.last_text == "45%|####      | 450/1000 [00:12<00:15, 36.1it/s]"
    assert attempt.tail.poll(NOW_S + 1).progress is None


def test_a_line_that_a_script_draws_again_in_place_is_progress_with_its_numbers(attempt: Attempt) -> None:
    """print(f"\\riter {i}/300, loss={loss:.4f}", end=""), as beginners write it."""
    told = Told()
    tail = OutputTail(attempt.raw, attempt.log, told=told)
    attempt.print(b"\riter 1/300, loss=0.9804\riter 2/300, loss=0.9615")
    news = tail.poll(NOW_S)
    assert news.progress is not None
    assert (news.progress.done, news.progress.total, news.progress.unit) == (2, 300, "iterations")
    assert [(entry.name, entry.value) for entry in told.latest] == [("loss", 0.9615)]


def test_a_real_tqdm_and_a_real_rich_bar_leave_few_lines_and_full_progress(attempt: Attempt) -> None:
    program = (
        "import time\nfrom tqdm import tqdm\nfrom rich.progress import Progress\n"
        "for _ in tqdm(range(300), desc='outer', mininterval=0):\n"
        "    for _ in tqdm(range(3), desc='inner', leave=False, mininterval=0): pass\n"
        "with Progress() as bars:\n"
        "    a, b = bars.add_task('first', total=300), bars.add_task('second', total=300)\n"
        "    for _ in range(300): bars.advance(a); bars.advance(b); bars.refresh()\n"
    )
    env = {**os.environ, "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": "80"}
    with open(attempt.raw, "ab") as raw:
        subprocess.run([sys.executable, "-c", program], stdout=raw, stderr=raw, env=env, check=True)
    assert attempt.raw.read_bytes().count(b"\r") > 1000
    attempt.tail.poll(NOW_S)
    attempt.tail.close()
    texts = attempt.texts()
    assert len(texts) < 200
    for last in ("outer:", "first ", "second "):
        assert any(last in text and "100%" in text for text in texts), last
    assert not any("\x1b" in text for text in texts)


def test_an_epoch_heading_between_bars_makes_their_end_the_runs(attempt: Attempt) -> None:
    """Keras: the heading of an epoch and the first states of its bar come in one poll."""
    bars = [f"\r{step:3d}/40 ━━━━━━━━━━━━━━━━━━━━ 1s 50ms/step - loss: 0.5" for step in (1, 20, 40)]
    for epoch in (1, 2):
        attempt.print(f"Epoch {epoch}/3\n{''.join(bars)}\n".encode())
        news = attempt.tail.poll(NOW_S + epoch)
    attempt.print(f"Epoch 3/3\n{bars[0]}{bars[1]}".encode())
    news = attempt.tail.poll(NOW_S + 3)
    assert news.progress is not None
    assert (news.progress.done, news.progress.total, news.progress.of) == (100, 120, "run")
    assert (news.progress.epoch, news.progress.epochs) == (3, 3)


def test_the_numbers_at_the_end_of_a_keras_epoch_belong_to_that_epoch(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = Attempt(tmp_path)
    tail = OutputTail(attempt.raw, attempt.log, told=Told(run))
    bar = "40/40 ━━━━━━━━━━━━━━━━━━━━ 1s 50ms/step - loss: 0.5"
    for epoch in (1, 2):
        attempt.print(f"Epoch {epoch}/3\n\r{bar}\r{bar} - val_loss: 0.{epoch}\n".encode())
    tail.poll(NOW_S)
    points = {series.name: series.points for series in read_series(run)}["val_loss"]
    assert [(point.step, point.value) for point in points] == [(40, 0.1), (80, 0.2)]


# -- protocol ------------------------------------------------------------------------------------------------------


def test_protocol_lines_are_progress_and_not_output(attempt: Attempt) -> None:
    attempt.print(b"before\n::jackline phase=tokenise done=120 total=1000 unit=docs\nafter\n")
    news = attempt.tail.poll(NOW_S)
    assert news.lines == ("before", "after")
    assert news.progress is not None
    assert (news.progress.phase, news.progress.done, news.progress.source) == ("tokenise", 120, "protocol")
    assert attempt.texts() == ["before", "[jackline] tokenise 120/1,000 docs", "after"]


def test_a_phase_that_counts_nothing_is_logged_by_its_name_alone(attempt: Attempt) -> None:
    attempt.print(b"::jackline phase='training data' done=0\n")
    attempt.tail.poll(NOW_S)
    assert attempt.texts() == ["[jackline] training data"]


def test_a_malformed_protocol_line_is_ordinary_output(attempt: Attempt) -> None:
    attempt.print(b"::jackline what is this\n")
    assert attempt.tail.poll(NOW_S).lines == ("::jackline what is this",)
    assert attempt.texts() == ["::jackline what is this"]


def test_protocol_outranks_a_bar_and_a_bar_a_line(attempt: Attempt) -> None:
    attempt.print(b"::jackline phase=train done=5 total=10\n\rother 50%\r\nstep 1/7\n")
    news = attempt.tail.poll(NOW_S)
    assert news.progress is not None
    assert (news.progress.phase, news.progress.done) == ("train", 5)


# -- taking over ---------------------------------------------------------------------------------------------------


def test_a_new_reader_resumes_exactly_where_the_recorded_one_was(attempt: Attempt) -> None:
    attempt.print(b"one\ntwo\nhal")
    attempt.tail.poll(NOW_S)
    consumed, size = attempt.tail.consumed_bytes, attempt.log.size_bytes  # what supervisor.json holds
    attempt.print(b"f\nafter the record\n")
    attempt.tail.poll(NOW_S)  # then kill -9
    log = LogWriter(attempt.log_path, size_bytes=size)
    OutputTail(attempt.raw, log, consumed_bytes=consumed).poll(NOW_S)
    assert attempt.texts() == ["one", "two", "half", "after the record"]


def test_a_killed_reader_is_replaced_without_losing_or_doubling_a_line(attempt: Attempt, tmp_path: Path) -> None:
    """A real reader, killed -9 while a real child prints."""
    record = tmp_path / "record"
    reader = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from jackline.rundir.atomic import write_json\n"
        "from jackline.supervisor.output.reader import LogWriter, OutputTail\n"
        f"log = LogWriter(Path({str(attempt.log_path)!r}))\ntail = OutputTail(Path({str(attempt.raw)!r}), log)\n"
        "while True:\n"
        "    tail.poll(time.time())\n"
        f"    write_json(Path({str(record)!r}), [tail.consumed_bytes, log.size_bytes])\n"
    )
    with open(attempt.raw, "ab") as raw:
        child = subprocess.Popen([sys.executable, "-u", "-c", PRINTS_60000], stdout=raw)
    killed = subprocess.Popen([sys.executable, "-c", reader])
    try:
        wait_until(lambda: record.exists() and read_pair(record)[0] > 20_000)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert child.wait() == 0
    consumed, size = read_pair(record)
    assert consumed < attempt.raw.stat().st_size, "the reader was killed too late to prove anything"
    tail = OutputTail(attempt.raw, LogWriter(attempt.log_path, size_bytes=size), consumed_bytes=consumed)
    tail.close()
    assert attempt.texts() == [f"line {number}" for number in range(60_000)]


PRINTS_60000 = "for i in range(60000): print('line', i)"


def read_pair(path: Path) -> tuple[int, int]:
    consumed, size = (int(word) for word in re.findall(r"\d+", path.read_text()))
    return consumed, size


def wait_until(is_so: object, deadline_s: float = HANGS_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


def test_a_torn_last_line_of_the_log_does_not_swallow_the_next(attempt: Attempt) -> None:
    attempt.log_path.write_text(f"{STAMP}torn")
    LogWriter(attempt.log_path).write(["next"], NOW_S)
    assert attempt.log_path.read_text() == f"{STAMP}torn\n{STAMP}next\n"


def test_a_raw_file_cut_by_somebody_is_said_and_read_on(attempt: Attempt) -> None:
    attempt.print(b"one\ntwo\n")
    attempt.tail.poll(NOW_S)
    os.truncate(attempt.raw, 0)
    attempt.tail.poll(NOW_S)
    attempt.print(b"three\n")
    attempt.tail.poll(NOW_S)
    assert attempt.texts() == [
        "one",
        "two",
        "[jackline] the command cut its own output file raw.out (as `> /dev/stderr` in a shell script does): "
        "lines of the last tenth of a second before this may be missing; --tty avoids it",
        "three",
    ]


def test_a_raw_file_that_was_cut_and_has_grown_again_is_read_from_its_beginning(attempt: Attempt) -> None:
    attempt.print(b"one\n")
    attempt.tail.poll(NOW_S)
    os.truncate(attempt.raw, 0)
    attempt.print(b"two\nthree\n")
    attempt.tail.poll(NOW_S)
    assert [text for text in attempt.texts() if "[jackline]" not in text] == ["one", "two", "three"]


# -- the disk ------------------------------------------------------------------------------------------------------


def on_disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_what_was_read_long_ago_is_given_back_to_the_disk(attempt: Attempt) -> None:
    attempt.print((b"x" * 1023 + b"\n") * 1024 * 160)
    attempt.tail.close()
    assert attempt.raw.stat().st_size == 160 * MIB
    assert 64 * MIB <= on_disk_bytes(attempt.raw) <= 90 * MIB
    with open(attempt.raw, "rb") as file:
        assert first_data(file.fileno(), 0) == 160 * MIB - on_disk_bytes(attempt.raw)


def test_on_a_nearly_full_disk_almost_everything_read_is_given_back(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    older = tmp_path / "attempts" / "000"
    older.mkdir()
    (older / "raw.out").write_bytes(b"x" * MIB)
    attempt.print((b"x" * 1023 + b"\n") * 1024 * 8)
    space = Space(200 * MIB, 200 << 30)
    assert shortage(space) == "low"
    tail = OutputTail(attempt.raw, attempt.log, read_space_of=lambda path: space)
    while tail.poll(NOW_S).num_bytes:
        pass
    assert tail.is_short_of_space
    tail.close()
    assert on_disk_bytes(attempt.raw) <= 2 * MIB
    assert on_disk_bytes(older / "raw.out") == 0
    assert len(attempt.texts()) == 8192


def test_on_a_full_disk_the_log_gives_way_and_says_so_afterwards(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    reserve = attempt.folder / "reserve"
    assert make_reserve(reserve, MIB) == MIB
    spaces = {"now": Space(1 * MIB, 200 << 30)}
    tail = OutputTail(attempt.raw, attempt.log, read_space_of=lambda path: spaces["now"])
    attempt.print(b"one\ntwo\n")
    tail.poll(NOW_S)
    attempt.log.note("a note", NOW_S)
    assert attempt.texts() == []
    assert not reserve.exists(), "the reserve was not let go"
    assert tail.problem == (
        "out.log is not written: the disk is nearly full; what is left is for the command's own output"
    )
    spaces["now"] = ROOMY
    attempt.print(b"three\n")
    tail.poll(NOW_S + 60)
    assert attempt.texts() == [
        "[jackline] 2 lines of output are missing here: the disk was full since 2026-11-15T02:13:39.1Z",
        "[jackline] a note",
        "three",
    ]
    assert tail.problem == ""
    assert reserve.exists(), "no new reserve was made"


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        (100 << 30, 200 << 30, "none"),
        (3 << 30, 200 << 30, "low"),
        (300 * MIB, 1 << 30, "none"),
        (200 * MIB, 1 << 30, "low"),
        (10 * MIB, 200 << 30, "critical"),
        (7 * MIB, 8 * MIB, "none"),
        (MIB, 8 * MIB, "low"),
        (MIB // 2, 8 * MIB, "critical"),
    ],
)
def test_what_counts_as_nearly_full(free: int, total: int, expected: str) -> None:
    assert shortage(Space(free, total)) == expected


def test_low_is_256_mib_or_2_percent_and_never_more_than_a_quarter() -> None:
    assert [low_bytes(total) for total in (1 << 40, 10 << 30, 400 * MIB)] == [(1 << 40) // 50, 256 * MIB, 100 * MIB]


def test_a_reserve_holds_real_blocks_and_gives_them_back(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    assert make_reserve(path, MIB) == MIB
    assert on_disk_bytes(path) == MIB
    assert release_reserve(path)
    assert not release_reserve(path)


def test_a_log_that_cannot_be_opened_is_a_problem_not_an_error(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "nowhere" / "out.log")
    assert not log.write(["lost"], NOW_S)
    assert log.problem == "out.log cannot be opened: No such file or directory"
    (tmp_path / "nowhere").mkdir()
    assert log.write(["kept"], NOW_S)
    assert (tmp_path / "nowhere" / "out.log").read_text() == (
        f"{STAMP}[jackline] 1 line of output is missing here: the disk was full since 2026-11-15T02:13:39.1Z\n"
        f"{STAMP}kept\n"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_is_really_full_tears_no_line_and_the_gap_is_said(small_disk: Path) -> None:
    filler = small_disk / "filler"
    log = LogWriter(small_disk / "out.log")
    log.write(["first"], NOW_S)
    filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 8192))
    assert not log.write(["y" * 1000] * 100, NOW_S)
    assert log.problem == "out.log cannot be written: No space left on device"
    num_lost = log.num_lost_lines
    assert 0 < num_lost < 100
    filler.unlink()
    assert log.write(["last"], NOW_S)
    lines = (small_disk / "out.log").read_text().splitlines()
    assert lines == [
        f"{STAMP}first",
        *[f"{STAMP}{'y' * 1000}"] * (100 - num_lost),
        f"{STAMP}[jackline] {num_lost} lines of output are missing here: the disk was full since {STAMP.strip()}",
        f"{STAMP}last",
    ]
    assert (small_disk / "out.log").stat().st_size == log.size_bytes


PRINTS_ON = """
import sys, time
for number in range(1_000_000):
    print("number", number, "x" * 180)
    if number % 100 == 99:
        time.sleep(0.008)
"""


def test_a_child_that_prints_more_than_the_disk_holds_continues(small_disk: Path) -> None:
    attempt = Attempt(small_disk)
    assert make_reserve(attempt.folder / "reserve") > 0
    num_lines = 0
    with open(attempt.raw, "ab") as raw:
        child = subprocess.Popen([sys.executable, "-u", "-c", PRINTS_ON], stdout=raw, stderr=subprocess.PIPE)
    try:
        while attempt.raw.stat().st_size < 14 * MIB and child.poll() is None:
            num_lines += attempt.tail.poll(time.time()).num_lines
        assert child.poll() is None, f"the child died: {child.stderr.read().decode()}"  # type: ignore[union-attr]
    finally:
        child.kill()
        child.communicate()
    assert num_lines > 12 * MIB // 200, "less than one and a half disks full of lines were read"
    # Not one line is missing without being counted.
    expected = 0
    for text in attempt.texts():
        gap = re.match(r"\[jackline\] (\d+) lines? of output (?:is|are) missing here", text)
        assert gap or text == f"number {expected} {'x' * 180}"
        expected += int(gap[1]) if gap else 1
    assert expected < num_lines or "missing here" in attempt.log_path.read_text(), "the disk never was full"
    assert expected + attempt.log.num_lost_lines == num_lines


def test_what_a_child_prints_has_room_although_it_filled_the_disk_before_anybody_looked(small_disk: Path) -> None:
    begin_output(small_disk / "raw.out", small_disk / "raw.err")
    fill_bytes(small_disk)
    for name in ("raw.out", "raw.err"):
        with open(small_disk / name, "ab", buffering=0) as file:
            assert file.write(b"x" * 4096) == 4096
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "other").write_bytes(b"x" * 4096)


def test_a_child_continues_when_something_else_fills_the_disk(small_disk: Path) -> None:
    """The blocks ahead of raw.out are the child's: another file cannot take them."""
    attempt = Attempt(small_disk)
    attempt.print(b"before\n")
    attempt.tail.poll(NOW_S)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "checkpoint").write_bytes(b"x" * 9 * MIB)
    attempt.print(b"y" * 1023 + b"\n")
    attempt.print((b"y" * 1023 + b"\n") * 1024)
    assert attempt.tail.poll(NOW_S).num_lines == 1025

"""Files near and far: every byte in order, whatever the network does; refusals that name the cause."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request

import pytest

from jackline.data.sources.bytefile import (
    HttpFile,
    LocalFile,
    Patience,
    SourceChanged,
    SourceUnavailable,
    _DropTokenOnRedirect,
    retry_wait_s,
)
from tests.data.far_end import FakeTime, FarEnd, serving

DATA = os.urandom(700_000)


@pytest.fixture
def far_end() -> Iterator[FarEnd]:
    with serving(FarEnd({"data.bin": DATA})) as made:
        yield made


def read_whole(file: HttpFile, step: int = 100_000) -> bytes:
    out = b""
    while part := file.read_at(len(out), step):
        out += part
    file.close()
    return out


def test_a_far_file_is_read_in_one_request(far_end: FarEnd) -> None:
    file = HttpFile(far_end.address("data.bin"), Patience())
    assert file.size() == len(DATA)
    assert read_whole(file) == DATA
    assert far_end.requests == [("data.bin", None)]


def test_a_lost_connection_continues_at_the_byte_it_broke(far_end: FarEnd) -> None:
    far_end.faults = ["drop:123456", "reset", "drop:200000"]
    time = FakeTime()
    assert read_whole(HttpFile(far_end.address("data.bin"), time.patience())) == DATA
    assert [wanted for _, wanted in far_end.requests] == [
        None,
        "bytes=123456-",
        "bytes=123456-",
        "bytes=323456-",
    ]
    assert not far_end.faults


@pytest.mark.parametrize("code", ["429", "500", "503"])
def test_a_refusal_that_may_pass_is_waited_out_and_said(code: str, far_end: FarEnd) -> None:
    far_end.faults = [code, code]
    time = FakeTime()
    assert read_whole(HttpFile(far_end.address("data.bin"), time.patience())) == DATA
    assert len(far_end.requests) == 3
    assert f"HTTP {code}" in time.said[0]
    assert "trying again in" in time.said[0]


def test_a_server_that_falls_silent_is_left_and_asked_again(far_end: FarEnd) -> None:
    far_end.faults = ["stall:50000"]
    patience = Patience(stall_after_s=0.3)
    assert read_whole(HttpFile(far_end.address("data.bin"), patience)) == DATA
    assert far_end.requests[1] == ("data.bin", "bytes=50000-")


def test_a_server_without_ranges_is_read_again_up_to_the_byte(far_end: FarEnd) -> None:
    far_end.has_ranges = False
    far_end.faults = ["drop:300000"]
    assert read_whole(HttpFile(far_end.address("data.bin"), FakeTime().patience())) == DATA


def test_a_file_whose_length_nobody_tells_is_read_to_its_end(far_end: FarEnd) -> None:
    far_end.tells_length = False
    file = HttpFile(far_end.address("data.bin"), Patience())
    assert file.size() is None
    assert read_whole(file) == DATA
    assert file.size() == len(DATA)


def test_any_place_can_be_asked_for(far_end: FarEnd) -> None:
    file = HttpFile(far_end.address("data.bin"), Patience())
    assert file.read_at(600_000, 50) == DATA[600_000:600_050]
    assert file.read_at(10, 50) == DATA[10:60]
    assert file.read_at(60, 50) == DATA[60:110]
    assert file.read_at(len(DATA) - 5, 50) == DATA[-5:]
    assert file.read_at(len(DATA), 50) == b""
    assert len(far_end.requests) == 3
    file.close()


def test_when_the_network_stays_away_it_stops_and_says_that_nothing_was_skipped(far_end: FarEnd) -> None:
    far_end.faults = ["drop:1000", *["503"] * 100]
    file = HttpFile(far_end.address("data.bin"), FakeTime().patience(give_up_after_s=60))
    with pytest.raises(SourceUnavailable) as caught:
        read_whole(file)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"error: {far_end.address('data.bin')} gave no byte for 1 min")
    assert lines[0].endswith("at byte 1000: HTTP 503 Service Unavailable")
    assert lines[1] == "hint: nothing was skipped; run the same command again when the network is back"


def test_a_missing_file_is_an_error_at_once(far_end: FarEnd) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        HttpFile(far_end.address("nothing"), Patience()).size()
    assert str(caught.value) == (
        f"error: cannot read {far_end.address('nothing')}: HTTP 404 Not Found\n"
        "hint: check the spelling of the address"
    )


@pytest.mark.parametrize("what", ["length", "etag"])
def test_a_file_that_changes_while_it_is_read_is_refused(what: str, far_end: FarEnd) -> None:
    far_end.etags["data.bin"] = '"one"'
    far_end.faults = ["drop:100000"]
    file = HttpFile(far_end.address("data.bin"), FakeTime().patience())
    assert file.read_at(0, 90_000) == DATA[:90_000]
    if what == "length":
        far_end.files["data.bin"] = DATA + b"more"
    else:
        far_end.etags["data.bin"] = '"two"'
    with pytest.raises(SourceChanged) as caught:
        file.read_at(90_000, 100_000)
    causes = {
        "length": "it was 700000 bytes long and is 700004 bytes now",
        "etag": 'its ETag was "one" and is "two" now',
    }
    assert str(caught.value) == (
        f"error: {far_end.address('data.bin')} changed while it was read: {causes[what]}\n"
        "hint: build a new cache from the file as it is now: `jackline data prepare --rebuild`"
    )
    file.close()


def test_a_host_nobody_knows_is_given_up_after_seconds_not_a_quarter_of_an_hour() -> None:
    time = FakeTime()
    with pytest.raises(SourceUnavailable, match=r"no-such-host\.invalid/a\.txt gave no byte for 7\.0 s"):
        HttpFile("http://no-such-host.invalid/a.txt", time.patience()).size()
    assert time.now_s < 10


def test_a_port_where_nobody_listens_is_waited_for(far_end: FarEnd) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a.txt"
        with pytest.raises(SourceUnavailable, match="Connection refused"):
            HttpFile(url, FakeTime().patience(give_up_after_s=20)).size()


def test_waits_grow_and_a_server_may_ask_for_its_own() -> None:
    assert [retry_wait_s(attempt, None) for attempt in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 30.0]
    assert retry_wait_s(1, "7") == 7.0
    assert retry_wait_s(1, "99999") == 300.0


def test_a_local_file_that_cannot_be_opened_stops_by_name(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        LocalFile(str(tmp_path / "gone.txt"))
    assert str(caught.value) == f"error: cannot open {tmp_path}/gone.txt: No such file or directory"


def test_a_local_files_identity_is_its_content_not_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(DATA)
    first = LocalFile(str(path))
    os.utime(path, (1, 1))
    second = LocalFile(str(path))
    assert first.identity() == second.identity()
    path.write_bytes(DATA[:-1] + b"!")
    assert second.identity() != {**first.identity(), "size": 0}
    third = LocalFile(str(path))
    assert third.identity()["size"] == len(DATA)
    assert third.identity() != {"size": len(DATA), "edges": "0"}
    for file in (first, second, third):
        file.close()


@pytest.mark.parametrize(
    ("new", "keeps"),
    [
        ("https://hub.example/b", True),
        ("https://HUB.example:443/b", True),
        ("http://hub.example/b", False),
        ("https://hub.example:8443/b", False),
        ("https://store.example/b", False),
        ("https://hub.example.evil.example/b", False),
    ],
)
def test_an_access_token_stays_with_the_server_it_is_for(new: str, keeps: bool) -> None:
    """Not on another host, another port, or without encryption."""
    request = Request("https://hub.example/a", headers={"Authorization": "Bearer secret"})
    made = _DropTokenOnRedirect().redirect_request(request, io.BytesIO(), 302, "Found", {}, new)
    assert made is not None
    assert ("Authorization" in made.headers) is keeps


def test_a_redirect_to_another_port_of_the_same_host_is_followed_without_the_token(far_end: FarEnd) -> None:
    """Another service of that machine, perhaps of another person, would receive it."""
    with serving(FarEnd(moved={"same": "/data", "data": far_end.address("data.bin")})) as hub:
        file = HttpFile(hub.address("same"), Patience(), {"Authorization": "Bearer secret"})
        assert read_whole(file) == DATA
    assert [headers.get("Authorization") for headers in hub.headers] == ["Bearer secret"] * 2
    assert [headers.get("Authorization") for headers in far_end.headers] == [None]

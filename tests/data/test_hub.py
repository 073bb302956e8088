"""hf:// against a made-up hub on this machine: the commit is pinned, folders come one by one, the token is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from jackline.data.sources.hub import Listings, parse_hub_url
from jackline.errors import UsageError
from tests.data.corpora import jsonl_bytes, make_texts
from tests.deadline import HANGS_S

pytest.importorskip("huggingface_hub", reason="huggingface_hub is part of the train extra")

SHA = "0123456789abcdef0123456789abcdef01234567"
OWNED = {
    "data/a/1.jsonl": jsonl_bytes(make_texts(3)),
    "data/a/2.jsonl": jsonl_bytes(make_texts(6)[3:]),
    "data/b/1.jsonl": jsonl_bytes(make_texts(8)[6:]),
    "data/b/readme.bin": b"x",
    "README.md": b"hello",
}


class Hub:
    """Two answers of the hub's interface and its files; the files are on another host, as on the real one."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.url = self.store_url = ""
        self.num_refusals = 0
        self.newest = SHA  # an older commit stays readable

    def answer(self, path: str) -> tuple[int, Any]:
        root = "/api/datasets/some/set"
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            return 503, {"error": "busy"}
        if path in (root, f"{root}/revision/main"):
            return 200, {"id": "some/set", "sha": self.newest, "siblings": [], "tags": [], "private": False}
        for commit in {SHA, self.newest}:
            if path.startswith(f"{root}/tree/{commit}"):
                return 200, self.tree(path.removeprefix(f"{root}/tree/{commit}").strip("/"))
            if path.startswith(f"/datasets/some/set/resolve/{commit}/"):
                return 302, f"{self.store_url}/{path.split(commit)[1].strip('/')}"
        return 404, {"error": "not found"}

    def tree(self, folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for name, data in OWNED.items():
            if name.startswith(prefix):
                first = name[len(prefix) :].split("/")[0]
                is_file = prefix + first == name
                found[first] = {
                    "type": "file" if is_file else "directory",
                    "path": prefix + first,
                    "oid": "0" * 40,
                    **({"size": len(data)} if is_file else {}),
                }
        return list(found.values())


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            made.requests.append((f"{self.server.server_port}{path}", self.headers.get("Authorization")))  # type: ignore[attr-defined]
            if path.strip("/") in OWNED:
                self._send(200, OWNED[path.strip("/")])
                return
            code, value = made.answer(path)
            if code == 302:
                self.send_response(302)
                self.send_header("Location", value)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._send(code, json.dumps(value).encode())

        def _send(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """The tests' output stays the tests'."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    made.store_url = f"http://localhost:{server.server_port}"
    yield made
    server.shutdown()
    server.server_close()


CHILD = """
import json, sys
from jackline.data.sources.documents import Surroundings, find_text_columns, read_blocks
from jackline.data.sources.hub import pin_hub_url
from jackline.data.sources.listing import list_files
from jackline.data.spec import DataSpec, Source
from jackline.data.cache.state import begin
url = pin_hub_url(sys.argv[1])
names = [(found.name, found.size) for found in list_files(url)]
spec = find_text_columns(DataSpec((Source(url),)), Surroundings())
texts = [text.decode() for block in read_blocks(spec, begin(1), Surroundings()) for text in block.texts]
print(json.dumps([url, names, texts]))
"""


def read_in_child(hub: Hub, url: str, tmp_path: Path) -> Any:
    # The hub's client reads its address when it is imported, so it needs a process of its own.
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, url], capture_output=True, text=True, env=environment, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_data_set_is_listed_at_a_pinned_commit_and_read(hub: Hub, tmp_path: Path) -> None:
    url, names, texts = read_in_child(hub, "hf://datasets/some/set/data/**/*.jsonl", tmp_path)
    assert url == f"hf://datasets/some/set@{SHA}/data/**/*.jsonl"
    root = f"hf://datasets/some/set@{SHA}/data"
    assert names == [
        [f"{root}/a/1.jsonl", len(OWNED["data/a/1.jsonl"])],
        [f"{root}/a/2.jsonl", len(OWNED["data/a/2.jsonl"])],
        [f"{root}/b/1.jsonl", len(OWNED["data/b/1.jsonl"])],
    ]
    assert texts == make_texts(8)


def test_one_file_of_a_data_set(hub: Hub, tmp_path: Path) -> None:
    _, names, texts = read_in_child(hub, "hf://datasets/some/set/data/b/1.jsonl", tmp_path)
    assert len(names) == 1
    assert texts == make_texts(8)[6:]


def test_the_token_goes_to_the_hub_and_not_to_the_store_it_points_to(hub: Hub, tmp_path: Path) -> None:
    read_in_child(hub, "hf://datasets/some/set/data/a/1.jsonl", tmp_path)
    by_path = {path.split("/", 1)[1]: token for path, token in hub.requests}
    assert by_path[f"datasets/some/set/resolve/{SHA}/data/a/1.jsonl"] == "Bearer hf_secret"
    assert by_path["data/a/1.jsonl"] is None


def test_a_busy_hub_is_asked_again_and_a_missing_data_set_is_not(hub: Hub, tmp_path: Path) -> None:
    hub.num_refusals = 1
    assert read_in_child(hub, "hf://datasets/some/set/data/a/1.jsonl", tmp_path)[2] == make_texts(3)
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CHILD, "hf://datasets/no/such/a.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS_S)
    assert "error: cannot list hf://datasets/no/such/a.jsonl: " in done.stderr
    assert (
        "hint: a private data set needs `hf auth login` or HF_TOKEN; without network use a local copy" in done.stderr
    )


def test_addresses_of_the_hub() -> None:
    assert parse_hub_url("hf://datasets/a/b@v1/x/*.parquet") == ("a/b", "v1", "x/*.parquet")
    assert parse_hub_url("hf://datasets/a/b") == ("a/b", None, "")
    with pytest.raises(UsageError) as caught:
        parse_hub_url("hf://models/a/b")
    assert str(caught.value) == (
        "error: 'hf://models/a/b' is not a data set on the hub\nhint: write hf://datasets/OWNER/NAME/path/*.parquet"
    )


def trees(hub: Hub) -> list[str]:
    """The folders that were listed, in order of their names, each as often as it was asked for."""
    paths = [path.split("/", 1)[1] for path, _ in hub.requests]
    return sorted(path.split(SHA)[1].strip("/") for path in paths if f"/tree/{SHA}" in path)


def test_a_whole_build_asks_for_every_folder_once(hub: Hub, tmp_path: Path) -> None:
    """Column, tokenizer check, survey and reading want the same folders; two of them at the same time."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "JACKLINE_DATA": str(tmp_path)}
    words = ["data", "prepare", "hf://datasets/some/set/data/**/*.jsonl", "--tokenizer", "bytes"]
    command = [sys.executable, "-m", "jackline", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert trees(hub) == ["data", "data/a", "data/b"]


def test_a_folder_wanted_by_several_threads_is_asked_for_once_and_trouble_is_everybodys_own() -> None:
    listings, key = Listings(), ("some/set", SHA, "data")
    asked: list[str] = []
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer() -> list[Any]:
        asked.append(threading.current_thread().name)
        is_asked.set()
        assert may_answer.wait(HANGS_S)
        if len(asked) == 1:
            raise OSError("the line went dead")
        return ["a", "b"]

    found: list[Any] = []

    def want() -> None:
        try:
            found.append(listings.get(key, answer))
        except OSError as error:
            found.append(str(error))

    first = threading.Thread(target=want, name="first")
    first.start()
    assert is_asked.wait(HANGS_S)
    others = [threading.Thread(target=want, name="other") for _ in range(3)]
    for thread in others:
        thread.start()
    may_answer.set()
    for thread in (first, *others):
        thread.join(HANGS_S)
    assert asked == ["first", "other"]
    assert sorted(found, key=str) == [["a", "b"]] * 3 + ["the line went dead"]


def test_listings_that_grow_too_long_are_forgotten_oldest_first() -> None:
    listings = Listings(max_names=5)
    asked: list[str] = []

    def want(path: str) -> list[Any]:
        return listings.get(("some/set", SHA, path), lambda: asked.append(path) or [path] * 2)  # type: ignore[func-returns-value]

    for path in ("a", "b", "c", "c", "b", "a"):
        assert want(path) == [path] * 2
    assert asked == ["a", "b", "c", "a"]

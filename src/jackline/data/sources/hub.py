"""`hf://datasets/OWNER/NAME[@REVISION]/PATTERN`: files of a dataset on the Hugging Face Hub.

Owns: pinning the revision to a commit, so that an upload in the middle of a run changes nothing; listing the tree
page by page, each folder of a commit once per process; addresses and headers. HttpFile does the reading, so a lost
connection resumes at its byte. The `datasets` package is not needed.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from jackline.data.sources.bytefile import HttpFile, Patience, SourceUnavailable, retry_wait_s
from jackline.data.sources.formats import layout_of
from jackline.data.sources.walk import MAGIC, Entry, Found, read_pattern, walk
from jackline.errors import UsageError
from jackline.extras import install_line
from jackline.machine.reach import hub_trouble, no_network

T = TypeVar("T")
_MAX_TRIES = 6
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REMEMBERED = 100_000  # names: about 20 MB


class HubPath(NamedTuple):
    repo: str
    revision: str | None
    path: str

    def name(self, commit: str, path: str) -> str:
        return f"hf://datasets/{self.repo}@{commit}/{path}"


def parse_hub_url(url: str) -> HubPath:
    words = url.removeprefix("hf://").split("/", 3)
    if len(words) < 3 or words[0] != "datasets":
        raise UsageError(
            f"'{url}' is not a data set on the hub", hint="write hf://datasets/OWNER/NAME/path/*.parquet"
        )
    name, _, revision = words[2].partition("@")
    return HubPath(f"{words[1]}/{name}", revision or None, words[3] if len(words) > 3 else "")


def pin_hub_url(url: str) -> str:
    """The same address with the commit that the revision refers to now."""
    found = parse_hub_url(url)
    info = _ask(url, lambda: _api().dataset_info(found.repo, revision=found.revision))
    return found.name(info.sha, found.path)


class Listings:
    """Listings of folders in commits, which never change: each is requested once, even if several threads need it."""

    def __init__(self, max_names: int = _MAX_REMEMBERED) -> None:
        self._max_names = max_names
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, str], Future[list[Any] | None]] = {}  # oldest first

    def get(self, key: tuple[str, str, str], ask: Callable[[], list[Any]]) -> list[Any]:
        """The folder's entries. If another thread's request fails, a thread that waited for it asks again itself."""
        while True:
            with self._lock:
                future = self._known.get(key)
                if future is None:
                    mine = self._known[key] = Future()
            if future is None:
                return self._ask(key, mine, ask)
            entries = future.result()
            if entries is not None:
                return entries

    def _ask(
        self, key: tuple[str, str, str], mine: Future[list[Any] | None], ask: Callable[[], list[Any]]
    ) -> list[Any]:
        entries: list[Any] | None = None
        try:
            entries = ask()
            return entries
        finally:
            with self._lock:
                if entries is None:
                    del self._known[key]
                mine.set_result(entries)
                self._forget()

    def _forget(self) -> None:
        """Drop the oldest listings when there are too many names. Memory stays bounded; a dropped folder is requested
        again when needed."""
        sizes = {key: len(future.result() or ()) for key, future in self._known.items() if future.done()}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= self._max_names:
                return
            del self._known[key]
            total -= size


_listings = Listings()


def list_hub_files(url: str, *, start_at: str | None = None) -> Iterator[Found]:
    """Files in the order of names, folder by folder; only folders that the pattern can match are requested."""
    found = parse_hub_url(url)
    commit = found.revision or ""
    root = found.name(commit, "").rstrip("/")

    def list_folder(folder: str) -> list[Entry]:
        path = folder[len(root) :].strip("/")
        is_commit = _COMMIT.fullmatch(commit) is not None
        return _listings.get((found.repo, commit, path), lambda: ask(path)) if is_commit else ask(path)

    def ask(path: str) -> list[Entry]:
        how: dict[str, Any] = {"revision": commit or None, "repo_type": "dataset"}
        entries = _ask(url, lambda: list(_api().list_repo_tree(found.repo, path or None, **how)))
        return [
            Entry(entry.path.rsplit("/", 1)[-1], not hasattr(entry, "size"), getattr(entry, "size", None))
            for entry in entries
        ]

    parts = [part for part in found.path.split("/") if part]
    fixed = next((index for index, part in enumerate(parts) if MAGIC.search(part)), len(parts))
    if fixed == len(parts) and parts and layout_of(parts[-1]) is not None:
        fixed -= 1  # the pattern names one file
    pattern = read_pattern(parts[fixed:]) if fixed < len(parts) else ("**", "*")
    begin = "/".join([root, *parts[:fixed]])
    for file in walk(list_folder, begin, pattern, start_at=start_at):
        if layout_of(file.name) is not None:
            yield Found(file.name, file.size)


def open_hub_file(name: str, patience: Patience) -> HttpFile:
    import huggingface_hub

    found = parse_hub_url(name)
    address = huggingface_hub.hf_hub_url(found.repo, found.path, repo_type="dataset", revision=found.revision)
    token = huggingface_hub.get_token()
    return HttpFile(address, patience, {"Authorization": f"Bearer {token}"} if token else {})


@functools.cache
def _api() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError("hf:// needs the package huggingface_hub", hint=install_line("train")) from error
    return huggingface_hub.HfApi()


def _ask(url: str, question: Callable[[], T]) -> T:
    """Ask, and retry for about a minute if the problem may be temporary."""
    attempt = 0
    while True:
        try:
            return question()
        except UsageError:
            raise
        except Exception as error:  # the hub's client has its own error classes, different in every version
            attempt += 1
            if attempt >= _MAX_TRIES or not _may_pass(error):
                raise SourceUnavailable(
                    f"cannot list {url}: {_first_line(error)}",
                    hint="a private data set needs `hf auth login` or HF_TOKEN; without network use a local copy",
                ) from error
            if getattr(error, "response", None) is None:  # nothing answered
                refuse_without_network(url)
        time.sleep(retry_wait_s(attempt, None))


def refuse_without_network(what: str) -> None:
    """Raise within seconds where the hub cannot be reached."""
    if (trouble := hub_trouble()) is not None:
        raise SourceUnavailable(
            f"{no_network(trouble)}, so {what} cannot be read",
            hint="connect and run the same command again, or use a local copy",
        )


def _may_pass(error: Exception) -> bool:
    if type(error).__name__ == "OfflineModeIsEnabled":
        return False  # HF_HUB_OFFLINE=1: the user asked for it
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code is None or code in (408, 425, 429) or code >= 500


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Files of a source: one fixed order, begun anywhere, without listing everything first."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackline.data.sources.listing import list_files
from jackline.data.sources.walk import Entry, Found, walk
from jackline.errors import UsageError


def make_tree(root: Path) -> list[str]:
    names = ["a/x.txt", "a/y/z.txt", "a.txt", "b/1.jsonl", "b/10.jsonl", "b/2.jsonl", "c.csv"]
    for name in [*names, "b/notes.bin", ".hidden/h.txt", "b/.h.txt"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return names


def names_of(url: str, root: Path, **settings: str) -> list[str]:
    return [str(Path(found.name).relative_to(root)) for found in list_files(url, **settings)]  # type: ignore[arg-type]


def test_a_folder_is_listed_in_order_of_names_folder_by_folder(tmp_path: Path) -> None:
    make_tree(tmp_path)
    assert names_of(str(tmp_path), tmp_path) == [
        "a/x.txt", "a/y/z.txt", "a.txt", "b/1.jsonl", "b/10.jsonl", "b/2.jsonl", "c.csv",
    ]  # fmt: skip


def test_globs(tmp_path: Path) -> None:
    make_tree(tmp_path)
    assert names_of(f"{tmp_path}/b/*.jsonl", tmp_path) == ["b/1.jsonl", "b/10.jsonl", "b/2.jsonl"]
    assert names_of(f"{tmp_path}/**/*.txt", tmp_path) == ["a/x.txt", "a/y/z.txt", "a.txt"]
    assert names_of(f"{tmp_path}/[ab]/*.*", tmp_path) == [
        "a/x.txt",
        "b/1.jsonl",
        "b/10.jsonl",
        "b/2.jsonl",
        "b/notes.bin",
    ]
    assert names_of(f"{tmp_path}/b/?.jsonl", tmp_path) == ["b/1.jsonl", "b/2.jsonl"]


def test_listing_begins_again_at_any_file(tmp_path: Path) -> None:
    make_tree(tmp_path)
    whole = [found.name for found in list_files(str(tmp_path))]
    for number, name in enumerate(whole):
        assert [found.name for found in list_files(str(tmp_path), start_at=name)] == whole[number:]


def test_sizes_come_with_the_names(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    assert list(list_files(str(path))) == [Found(str(path), 5)]


def test_fifty_thousand_files_do_not_delay_the_first(tmp_path: Path) -> None:
    asked: list[str] = []

    def list_folder(folder: str) -> list[Entry]:
        asked.append(folder)
        if folder == "/data":
            return [Entry(f"chunk{n}", True, None) for n in range(10)]
        return [Entry(f"{n:05d}.jsonl", False, 1) for n in range(5000)]

    files = walk(list_folder, "/data", ("**", "*.jsonl"))
    assert next(files).name == "/data/chunk0/00000.jsonl"
    assert asked == ["/data", "/data/chunk0"]
    asked.clear()
    again = walk(list_folder, "/data", ("**", "*.jsonl"), start_at="/data/chunk7/04999.jsonl")
    assert [next(again).name, next(again).name] == ["/data/chunk7/04999.jsonl", "/data/chunk8/00000.jsonl"]
    assert asked == ["/data", "/data/chunk7", "/data/chunk8"]


def test_addresses_with_a_range_of_numbers(tmp_path: Path) -> None:
    found = [file.name for file in list_files("https://host/part-{008..011}.jsonl.zst")]
    assert found == [f"https://host/part-{n:03d}.jsonl.zst" for n in (8, 9, 10, 11)]
    assert [f.name for f in list_files("https://h/{1..2}/{1..2}.txt", start_at="https://h/2/1.txt")] == [
        "https://h/2/1.txt",
        "https://h/2/2.txt",
    ]


def test_the_standard_library_of_this_python_is_a_source() -> None:
    found = [file.name for file in list_files("python-stdlib")]
    assert len(found) > 300
    assert any(name.endswith("/dataclasses.py") for name in found)
    assert not any("/test/" in name or "/site-packages/" in name for name in found)


def test_a_link_to_a_folder_above_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "y.txt").write_text("y")
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "other")
    assert names_of(str(tmp_path), tmp_path) == ["a/linked/y.txt", "a/x.txt", "other/y.txt"]


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(list_files(f"{tmp_path}/nothing.txt"))
    assert str(caught.value) == (
        f"error: there is no file or folder {tmp_path}/nothing.txt\n"
        "hint: check the path; globs like 'data/*.txt' work too"
    )


def test_two_deep_wildcards_are_refused_instead_of_listing_twice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'\\*\\*' may only stand before the last part"):
        list(list_files(f"{tmp_path}/**/a/**/*.txt"))

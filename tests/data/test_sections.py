"""One long text file: divided between training and validation by parts of whole lines, spread over the file."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jackline.data.cache.state import Cursor, begin
from jackline.data.sources.documents import Surroundings, read_blocks
from jackline.data.sources.sections import is_validation_section, section_bytes
from jackline.data.spec import DataSpec
from tests.data.corpora import make_text, make_texts, read_texts, spec_of


def wiki(num_articles: int) -> str:
    """In the format of WikiText: headings between equals signs, blank lines that hold a space."""
    return "".join(
        f" \n = Article {n} = \n \n {make_text(n, 120)} \n \n = = Part = = \n \n {make_text(n + 7, 200)} \n"
        for n in range(num_articles)
    )


def splits(path: Path, fraction: float = 0.05, **settings: object) -> tuple[DataSpec, DataSpec]:
    spec = spec_of(path, validation_fraction=fraction, **settings)
    return replace(spec, split="train").located(), replace(spec, split="validation").located()


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_the_two_splits_are_the_file_and_share_no_line(ending: str, fraction: float, tmp_path: Path) -> None:
    text = wiki(900)
    path = tmp_path / f"wiki.{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending == "txt.gz" else text.encode())
    train, validation = map(read_texts, splits(path, fraction))
    assert sum(map(len, train)) + sum(map(len, validation)) == len(text)
    assert sum(map(len, validation)) / len(text) == pytest.approx(fraction, rel=0.5)
    places = [text.index(part) for part in validation]
    assert len(places) >= 3 and max(places) - min(places) > len(text) / 3
    for part in train + validation:
        assert part in text
        assert part.endswith("\n")
    rebuilt = sorted([*((text.index(part), part) for part in train + validation)])
    assert "".join(part for _, part in rebuilt) == text


def test_the_split_is_the_same_from_every_place(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text(wiki(3000), encoding="utf-8")
    for spec in splits(path):
        blocks = list(read_blocks(spec, begin(1), Surroundings()))
        for block in blocks[1:]:
            again = Cursor.from_json(json.loads(json.dumps(Cursor(block.before).to_json())))
            rest = list(read_blocks(spec, again.state, Surroundings()))
            assert [text for item in rest for text in item.texts] == [
                text for item in blocks[blocks.index(block) :] for text in item.texts
            ]


def test_only_a_single_text_file_is_divided_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("a")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.jsonl").write_text("")

    def chosen(url: str, **settings: object) -> str:
        return splits(Path(url), **settings)[0].sources[0].split_by

    assert chosen(f"{tmp_path}/a.txt") == "lines"
    assert chosen(f"{tmp_path}/gone.txt") == "lines"
    assert chosen(f"{tmp_path}/one") == chosen(f"{tmp_path}/one/*.txt") == "lines"
    assert chosen(f"{tmp_path}/*.txt") == chosen(str(tmp_path)) == chosen(f"{tmp_path}/c.jsonl") == "document"
    assert chosen(f"{tmp_path}/a.txt", documents="line") == "document"
    assert (
        spec_of("https://host/a.txt", split="train", validation_fraction=0.1).located().sources[0].split_by == "lines"
    )
    assert (
        spec_of("python-stdlib", split="train", validation_fraction=0.1).located().sources[0].split_by == "document"
    )
    whole = spec_of(tmp_path / "a.txt").located()
    assert whole.sources[0].split_by == "document"


def test_what_is_not_divided_keeps_its_fingerprint(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "a.txt", split="train", validation_fraction=0.1)
    document = replace(spec, sources=(replace(spec.sources[0], split_by="document"),))
    lines = replace(spec, sources=(replace(spec.sources[0], split_by="lines"),))
    assert spec.fingerprint("t") == document.fingerprint("t") != lines.fingerprint("t")
    assert spec.located().fingerprint("t") == lines.fingerprint("t")


def test_every_stratum_has_exactly_one_section_for_validation() -> None:
    for fraction in (0.001, 0.01, 0.05, 0.3, 0.5, 0.9):
        chosen = [is_validation_section(1, number, fraction) for number in range(20_000)]
        assert sum(chosen) == pytest.approx(20_000 * fraction, abs=1)
    assert section_bytes(1_100_000, 0.01, is_compressed=False) == 2048
    assert section_bytes(None, 0.01, is_compressed=False) == 1 << 14
    assert section_bytes(1 << 40, 0.01, is_compressed=True) == 1 << 16


def test_damage_in_a_divided_file_is_in_one_split_and_counted_in_both(tmp_path: Path) -> None:
    lines = make_texts(5000)
    data = bytearray("".join(f"{line}\n" for line in lines).encode())
    data[500_000] = 0xFF
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    for spec in splits(path):
        *_, last = read_blocks(spec, begin(1), Surroundings())
        assert last.after.counts.lost.places[0].line == data[:500_000].count(b"\n") + 1

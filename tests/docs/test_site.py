"""The documentation as a site: every page is in it once, its links lead somewhere, its reference is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jackline.cli.main import COMMANDS
from tests.docs.reference import NOTEBOOK, PYTHON, cli_page, files_page, python_page
from tests.docs.site import ROOT, broken_in_site, listed, page, places, site_target, stage
from tests.docs.test_links import broken_links
from tests.test_public_names import NOTEBOOK as NOTEBOOK_NAMES
from tests.test_public_names import PUBLIC


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    stage(folder)
    return folder


def test_every_page_of_the_navigation_is_there_once(staged: Path) -> None:
    names = listed()
    assert len(names) == len(set(names))
    assert [name for name in names if not (staged / name).is_file()] == []


def test_every_link_of_a_staged_page_leads_somewhere(staged: Path) -> None:
    def plain(path: Path) -> Path:
        path.write_text(re.sub(r" \{#[^}]*\}$", "", path.read_text(), flags=re.MULTILINE))
        return path

    pages = [plain(path) for path in sorted(staged.rglob("*.md"))]
    assert {str(path.relative_to(staged)): found for path in pages if (found := broken_links(path))} == {}


def test_links_to_files_outside_of_the_site_lead_to_the_repository() -> None:
    assert site_target("docs/guides/run.md", "own-loop.md#x") == "own-loop.md#x"
    assert site_target("README.md", "docs/guides/run.md") == "guides/run.md"
    assert site_target("docs/guides/run.md", "../../README.md") == "../index.md"
    repository = "https://github.com/jackline-dev/jackline"
    assert (
        site_target("docs/ARCHITECTURE.md", "../src/jackline/errors.py")
        == f"{repository}/blob/main/src/jackline/errors.py"
    )
    assert site_target("README.md", "examples/") == f"{repository}/tree/main/examples"
    assert (
        page("README.md", "## Exit -9\n```\n## [x](y.md)\n```\n") == "## Exit -9 {#exit--9}\n```\n## [x](y.md)\n```\n"
    )


def test_a_built_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="one"></h1><a href="b.html#two"></a><a href="a.html#one"></a>')
    (tmp_path / "b.html").write_text('<a href="../gone.html"></a><img src="x.png"><a href="https://x.y/z"></a>')
    assert sorted(broken_in_site(tmp_path)) == ["a.html: b.html#two", "b.html: ../gone.html", "b.html: x.png"]


def test_the_reference_has_every_command_option_and_public_name() -> None:
    text = cli_page()
    for name in COMMANDS:
        assert f"\n## jackline {name}\n" in text
    for option in ("--time-limit DURATION", "--json", "--to TARGET", "--png"):
        assert f"`{option}`" in text
    assert "\n### jackline runs prune\n" in text
    assert {*PYTHON, "notebook", "__version__"} == set(PUBLIC) and set(NOTEBOOK) == set(NOTEBOOK_NAMES)
    python = python_page()
    assert "| `save_every_steps` |" in python and "### notebook.train" in python


def test_the_reference_of_files_follows_the_records() -> None:
    text = files_page()
    assert "| `time_limit` | `TimeLimitRecord` |" in text and "| `stops_at_s` | `float \\| None` |" in text


def test_nothing_that_the_site_leaves_out_is_forgotten() -> None:
    left = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - set(places())
    assert left == {"docs/SEED_COVERAGE.md", *(name for name in left if name.startswith("docs/skill/"))}

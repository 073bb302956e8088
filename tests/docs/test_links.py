"""The documents: every relative link leads somewhere, and every source file they name is there."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.deadline import HANGS_S

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PATH_IN_TEXT = re.compile(r"`((?:src/jackline|tests|docs|scripts|examples|notebooks)/[\w./-]*)(?:::\w+)?`")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FOR_CONTRIBUTORS = ("CONTRIBUTING.md", "SECURITY.md", "CHANGES.md", "README.md", "docs/GLOSSARY.md")


@cache
def documents() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S,
    )  # fmt: skip
    if listed.returncode == 0:
        return tuple(ROOT / name for name in sorted(listed.stdout.split()) if (ROOT / name).exists())
    return tuple(sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]))  # unpacked from the sdist


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip()).replace(" ", "-") for heading in plain}


def broken_links(path: Path) -> list[str]:
    broken = []
    for target in (first or second for first, second in LINK.findall(prose(path))):
        if re.match(r"[a-z]+:", target):
            continue  # an address: whether it answers is not ours to test
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_resolves(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_and_a_missing_heading_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A step, and `more`\n")
    page.write_text(
        "# Here\n[good](other.md) [good](other.md#a-step-and-more) [good](#here) [good](https://example.org/x)\n"
        "[bad](gone.md) [bad](other.md#gone) ![bad](gone.png)\n```\n[code](gone.md)\n```\n"
    )
    assert broken_links(page) == ["gone.md", "other.md#gone", "gone.png"]


@pytest.mark.parametrize("name", FOR_CONTRIBUTORS)
def test_every_path_named_in_backticks_is_there(name: str) -> None:
    """So that a module that moves takes the documents along."""
    missing = [
        path for path in PATH_IN_TEXT.findall((ROOT / name).read_text(encoding="utf-8")) if not (ROOT / path).exists()
    ]
    assert missing == []


def test_the_readme_leads_to_every_guide_and_recipe_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs/recipes").glob("*.md")):
        assert f"({page.relative_to(ROOT)})" in text, f"README.md does not lead to {page.relative_to(ROOT)}"


def test_the_changelog_has_the_form_people_know() -> None:
    text = (ROOT / "CHANGES.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    sections = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_scripts_of_this_repository_and_nothing_else(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        script = command.split()[0]
        assert script.startswith("scripts/") and "\n" not in command.strip(), command
        assert (ROOT / script).is_file(), command


def test_the_issue_templates_have_what_github_asks_for() -> None:
    templates = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(templates) >= 3
    for path in templates:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form), path.name
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all(field["id"] and field["attributes"]["label"] for field in fields), path.name
        assert len({field["id"] for field in fields}) == len(fields), path.name

"""The documentation as a site: stages the pages for `scripts/docs`, and checks every link of what was built.

    python -m tests.docs.site stage build/docs
    python -m tests.docs.site check build/site

The pages are written for GitHub. Staging makes links between them work in the site too, gives headings the anchors
that GitHub gives them, points links to source files at the repository, and adds the reference made from the code.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import urllib.parse
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import yaml

from tests.docs.reference import PAGES

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/jackline-dev/jackline"
# Pages beside docs/, by their names in the site.
BESIDE = {"README.md": "index.md", "CHANGES.md": "CHANGES.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
LEFT_OUT = ("docs/skill/", "docs/SEED_COVERAGE.md")  # for agents and for the project itself
_LINK = re.compile(r"(\[[^\]\n]*\]\()([^)\s]+)(\))|(src=\")([^\"]+)(\")")
_FENCE = re.compile(r"^(```.*?^```[^\S\n]*$)", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(#+) +(.+?) *$", re.MULTILINE)


@cache
def places() -> dict[str, str]:
    """Files of the repository that are in the site: where they are, and where they are there."""
    found = {f"docs/{path.relative_to(ROOT / 'docs')}": str(path.relative_to(ROOT / "docs")) for path in _docs()}
    return {**{name: place for name, place in found.items() if not name.startswith(LEFT_OUT)}, **BESIDE}


def _docs() -> list[Path]:
    return sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".png", ".svg"))


def stage(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for name, place in places().items():
        target = out / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            target.write_text(page(name, (ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / name, target)
    for name, make in PAGES.items():
        (out / "reference" / name).write_text(with_anchors(make()), encoding="utf-8")


def page(name: str, text: str) -> str:
    """A page of the repository as it is staged. Code blocks stay as they are."""
    parts = _FENCE.split(text)
    staged = [
        part if number % 2 else _LINK.sub(lambda match: _link(name, match), part) for number, part in enumerate(parts)
    ]
    return with_anchors("".join(staged))


def _link(name: str, match: re.Match[str]) -> str:
    before, target, after = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
    return f"{before}{site_target(name, target)}{after}"


def site_target(name: str, target: str) -> str:
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return target
    wanted = os.path.normpath(os.path.join(os.path.dirname(name), path))
    if wanted in places():
        here = os.path.dirname(places()[name])
        return os.path.relpath(places()[wanted], here or ".") + hash_ + anchor
    kind = "tree" if (ROOT / wanted).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{wanted}{hash_}{anchor}"


def with_anchors(text: str) -> str:
    """Headings with the names that GitHub gives them, because links use these."""
    parts = _FENCE.split(text)
    return "".join(part if number % 2 else _HEADING.sub(_named, part) for number, part in enumerate(parts))


def _named(match: re.Match[str]) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[2]).lower()
    anchor = re.sub(r"[^\w\- ]", "", plain.strip()).replace(" ", "-")
    return f"{match[1]} {match[2]} {{#{anchor}}}"


class Seen(HTMLParser):
    """Links and anchors of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value and tag in ("a", "img"):
                self.links.append(value)
            elif key in ("id", "name") and value:
                self.anchors.add(value)


def broken_in_site(site: Path) -> list[str]:
    """Every link inside the site that leads nowhere, as 'page: link'."""
    pages = {path: Seen(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    assert pages, f"there is no page in {site}"
    broken = []
    for path, seen in pages.items():
        for link in seen.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / urllib.parse.unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            is_there = target.exists() and (
                not anchor or known is None or urllib.parse.unquote(anchor) in known.anchors
            )
            broken += [] if is_there else [f"{path.relative_to(site)}: {link}"]
    return broken


def nav_pages(entry: object) -> list[str]:
    """The pages of a navigation, as mkdocs.yml nests it."""
    if isinstance(entry, str):
        return [] if "://" in entry else [entry]
    values = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
    return [name for value in values for name in nav_pages(value)]


def listed() -> list[str]:
    return nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


if __name__ == "__main__":
    act, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    if act == "stage":
        stage(folder)
        if absent := {str(path.relative_to(folder)) for path in folder.rglob("*.md")} - set(listed()):
            sys.exit(f"docs: not in the navigation of mkdocs.yml: {', '.join(sorted(absent))}")
    elif wrong := broken_in_site(folder):
        sys.exit("docs: links that lead nowhere\n" + "\n".join(wrong))

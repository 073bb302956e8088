"""The pictures of pages in docs/pictures: real runs, the real page, a real browser (`scripts/picture pages`).

    python -m tests.docs.shots SITE_PACKAGES

SITE_PACKAGES is a folder with playwright. Takes two minutes: five trainings, one resumes, one
hangs. Owns the scenes; the page, the report and the card are those that people see.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deadline import HANGS_S

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
NAMES = ("list.png", "dash.png", "dash-phone.png", "report.png", "card.png")
JACKLINE = (sys.executable, "-m", "jackline")
KEEP = ("--checkpoints", "checkpoints/{}/step-*.json", "--resume-arg", "--resume {{checkpoint}}", "--restart", "3")
RUNS = {
    "night": (["--lr", "0.02", "--steps", "9000", "--lose-connection-at", "700"], [*KEEP, "--time-limit", "2h"]),
    "lr-0.01": (["--lr", "0.01"], [*KEEP]),
    "lr-0.1": (["--lr", "0.1"], [*KEEP]),
    "no-restart": (["--lr", "0.05", "--lose-connection-at", "500"], ["--restart", "0"]),
    "hangs": (["--hang-at", "350"], ["--stuck-after", "20"]),
}


class Scene:
    """A folder with the runs, and how to ask for their state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Its home, so that the pictures show `~` and no folder of this machine.
        self.env = {
            **os.environ,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "JACKLINE_RUNS": str(folder / "runs"),
        }
        shutil.copy(FOLDER / "project" / "night.py", folder)

    def jackline(self, *words: str) -> str:
        done = subprocess.run(
            [*JACKLINE, *words], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=HANGS_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str) -> None:
        words, options = RUNS[name]
        options = [option.format(name) for option in options]
        self.jackline("run", "--name", name, "--detach", *options, "--", "python3", "night.py", name, *words)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.jackline("status", name, "--json"))
        return found

    def wait(self, name: str, is_so: Any) -> None:
        deadline_s = time.monotonic() + HANGS_S
        while not is_so(found := self.status(name)):
            assert time.monotonic() < deadline_s, f"{name} is {found['state']}: {found['text']}"
            time.sleep(1.0)


def play(scene: Scene) -> None:
    """Start all runs; return when each is in the state that the pictures show."""
    for name in RUNS:
        scene.start(name)
    for name in ("lr-0.01", "lr-0.1"):
        scene.wait(name, lambda found: found["state"] == "finished")
    scene.wait("no-restart", lambda found: found["state"] == "dead")
    scene.wait("hangs", lambda found: (found["supervisor"]["verdict"] or {}).get("kind") == "STUCK")
    scene.wait("night", lambda found: found["attempt"] == 2 and (found["progress"] or {"done": 0})["done"] >= 2600)


@contextmanager
def served(scene: Scene) -> Iterator[str]:
    words = [*JACKLINE, "dash", "--port", "0", "--price", "2.5/h"]
    server = subprocess.Popen(words, cwd=scene.folder, env=scene.env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


def take(scene: Scene, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or sys.exit("error: there is no chromium: apt-get install chromium")
    card = subprocess.run(
        [sys.executable, "-c", CARD], env=scene.env, capture_output=True, text=True, check=True, timeout=HANGS_S
    ).stdout
    scene.jackline("report", "no-restart", "--out", "report.html", "--price", "2.5/h")
    with sync_playwright() as found, served(scene) as address:
        browser = found.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def shot(name: str, width: int, high: int, scheme: str, run: str = "", page: str = "") -> None:
            tab = browser.new_context(viewport={"width": width, "height": high}, color_scheme=scheme).new_page()
            tab.goto(page or address)
            if not page:
                tab.wait_for_selector(".runs .spark path")
            if run:
                tab.get_by_role("link", name=run, exact=True).click()
                tab.wait_for_selector('.drawn[aria-label^="Chart of"]')
                tab.wait_for_selector("ol.told li")
            tab.wait_for_timeout(2500)  # drawn, and one round of news
            tab.screenshot(path=out / name)

        shot("list.png", 1100, 620, "light")
        shot("dash.png", 1200, 1250, "dark", "night")
        shot("dash-phone.png", 390, 844, "light", "night")
        shot("report.png", 820, 1000, "light", page=(scene.folder / "report.html").as_uri())
        (scene.folder / "card.html").write_text(f"<!doctype html><meta charset=utf-8><body>{card}")
        shot("card.png", 900, 520, "light", page=(scene.folder / "card.html").as_uri())


CARD = """
import os, time
from pathlib import Path
from jackline.cli.view.run_view import read_view
from jackline.notebook.card import card_html, read_charts
from jackline.rundir.layout import RunDir
run = RunDir(Path(os.environ["JACKLINE_RUNS"], "night"))
print(card_html(read_view(run, now_s=time.time()), read_charts(run)))
"""


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="jackline-pictures-") as folder:
        scene = Scene(Path(folder))
        try:
            play(scene)
            take(scene, FOLDER)
        finally:
            for name in ("night", "hangs"):
                subprocess.run([*JACKLINE, "stop", name], cwd=folder, env=scene.env, capture_output=True)
    for name in NAMES:
        print(f"docs/pictures/{name}  {(FOLDER / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

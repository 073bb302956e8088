"""The page in a real browser, on real run folders. Skipped in words without playwright or Debian's chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jackline.rundir.layout import RunDir
from tests.dashboard.asking import Served
from tests.dashboard.conftest import write_metrics
from tests.deadline import HANGS_S

pytest.importorskip("starlette", reason="the extra 'dash' is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
if not Path(CHROMIUM).exists():
    pytest.skip("there is no chromium: apt-get install chromium", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as found:
        started = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Page:
    """A tab that counts what must never happen: dialogs, errors, requests to other hosts."""

    def __init__(self, browser: Any, served: Served, *, without_uplot: bool = False, **options: Any) -> None:
        context = browser.new_context(**options)
        context.set_default_timeout(HANGS_S * 1000)
        self.tab = context.new_page()
        self.wrong: list[str] = []
        self.tab.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.tab.on(
            "request", lambda asked: None if asked.url.startswith(served.base) else self.wrong.append(asked.url)
        )
        served.get("api/runs")  # it answers
        if without_uplot:
            self.tab.route("**/uplot.js", lambda asked: asked.fulfill(body="", content_type="text/javascript"))
        self.tab.goto(served.url)

    def open(self, name: str) -> None:
        self.tab.get_by_role("link", name=name, exact=True).click()
        self.tab.wait_for_selector(".cards .box")

    def wait_for(self, script: str) -> None:
        """Asks from outside: the page's own policy forbids to evaluate text inside it."""
        deadline_s = time.monotonic() + HANGS_S
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline_s, (
                f"in vain: {script}; the page says {self.tab.inner_text('body')[:3000]}"
            )
            self.tab.wait_for_timeout(50)


def hostile(run: RunDir) -> None:
    """Text that a page must not take for its own, in every place that the page shows."""
    contents = json.loads(run.run_file.read_text())
    contents.update(name=EVIL, argv=["python", EVIL], cwd=EVIL, git={"commit": EVIL, "branch": EVIL})
    run.run_file.write_text(json.dumps(contents))
    write_metrics(run, [{"step": step, EVIL: step, f"loss {EVIL}": 1.0} for step in range(60)])
    run.out_log.write_text(f"2026-11-16T09:00:00.0Z {EVIL}\n" * 30)
    run.config_file.write_text(f"name: {EVIL}\n")
    event = {"at_s": time.time(), "event": "died", "text": f"{EVIL}\n{EVIL}"}
    run.supervisor_events.write_text(json.dumps(event) + "\n")


def test_hostile_text_stays_text_and_a_phone_needs_no_sideways_scrolling(
    browser: Any, served: Served, runs: Path
) -> None:
    hostile(RunDir(runs / "format1-finished"))
    page = Page(browser, served, viewport=PHONE)
    page.tab.wait_for_selector("table.runs")
    sideways = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.tab.evaluate(sideways)
    page.open(EVIL)
    page.wait_for(
        "document.querySelector('.drawn[aria-label^=Chart]') !== null && document.querySelector('pre span')"
    )
    page.tab.get_by_text("Config", exact=True).click()
    page.wait_for("[...document.querySelectorAll('pre')].some((one) => one.textContent.startsWith('name: '))")
    page.tab.locator("figure details summary").first.click()
    page.tab.get_by_label("Search the log").fill("onerror")
    page.wait_for(
        "[...document.querySelectorAll('.tools .dim')].some((one) => one.textContent.startsWith('30 lines'))"
    )
    assert page.tab.evaluate(sideways)
    assert page.tab.locator("main img, main script").count() == 0
    assert EVIL in page.tab.inner_text("h1") and page.wrong == []
    assert "#token" not in page.tab.url and page.tab.evaluate("document.cookie") == ""


def test_two_runs_are_compared_by_tokens_and_by_config_and_nothing_hinders_a_screen_reader(
    browser: Any, served: Served, runs: Path
) -> None:
    for name, rate in (("format1-finished", 3e-4), ("second", 6e-4)):
        run = RunDir(runs / name)
        if name == "second":
            shutil.copytree(runs / "format1-finished", run.path)
        contents = json.loads(run.run_file.read_text())
        run.run_file.write_text(
            json.dumps({**contents, "name": name, "argv": ["python", "train.py", f"--lr={rate}"]})
        )
        run.config_file.write_text(f"lr: {rate}\nbatch_size: 8\nseq_len: 128\n")
        write_metrics(run, [{"step": step, "at_s": 1.794e9 + step, "loss": 9 / step} for step in range(1, 200)])
    page = Page(browser, served, viewport=PHONE, bypass_csp=True)
    page.tab.wait_for_selector("table.runs")
    page.open("format1-finished")
    page.wait_for("document.querySelector('.drawn[aria-label^=Chart]') !== null")
    page.tab.get_by_label("Horizontal axis").select_option("tokens")
    page.tab.get_by_text("compare with other runs").click()
    page.tab.get_by_label("second", exact=True).check()
    page.tab.locator("figure details summary").first.click()
    page.wait_for("(document.querySelector('figure table')?.textContent || '').includes('second loss')")
    numbers = page.tab.locator("figure table").first.inner_text()
    assert "tokens" in numbers and "1,024" in numbers and "203,776" in numbers  # 199 steps of 8 x 128
    page.tab.get_by_text("Config", exact=True).click()
    page.tab.get_by_label("Compare with another run").select_option(label="second")
    page.wait_for("[...document.querySelectorAll('caption')].some((one) => one.textContent === 'What differs')")
    assert page.tab.get_by_role("cell", name="0.0006", exact=True).count() == 2  # of the command and of the settings
    assert page.tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth") and page.wrong == []
    axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python, for axe-core")
    script = next(Path(axe.__file__).parent.rglob("axe*.js")).read_text()
    page.tab.evaluate(script)
    assert [found["id"] for found in page.tab.evaluate("axe.run()")["violations"]] == []


@pytest.mark.parametrize("without_uplot", [False, True], ids=["uplot", "own lines"])
def test_charts_are_read_by_keyboard_and_keep_nothing_from_a_reader(
    browser: Any, served: Served, runs: Path, without_uplot: bool
) -> None:
    run = RunDir(runs / "format1-finished")
    contents = json.loads(run.run_file.read_text())
    run.run_file.write_text(json.dumps({**contents, "name": "charted"}))
    rows = [{"step": step, "loss": "nan" if step == 50 else 100 / step} for step in range(1, 101)]
    write_metrics(run, rows)
    page = Page(browser, served, without_uplot=without_uplot)
    page.tab.wait_for_selector("table.runs")
    page.open("charted")
    has_uplot = not without_uplot and page.tab.evaluate("typeof uPlot === 'function'")
    drawing = ".drawn canvas" if has_uplot else ".drawn svg"
    page.tab.wait_for_selector(drawing)
    loss = page.tab.locator('.drawn[aria-label^="Chart of loss"]')
    assert "from 1 to 100; loss ends at 1." in loss.get_attribute("aria-label")
    loss.focus()
    page.tab.keyboard.press("Home")
    read = page.tab.locator("figure .read").first
    assert read.inner_text() == "step 1: loss 100" and read.get_attribute("aria-live") == "polite"
    page.tab.keyboard.press("End")
    assert read.inner_text() == "step 100: loss 1"
    page.tab.keyboard.press("ArrowLeft")
    assert read.inner_text() == "step 98: loss 1.02"
    page.tab.keyboard.press("Escape")
    assert read.inner_text() == ""
    page.tab.get_by_label("log scale").check()
    page.tab.get_by_label("smoothing").fill("0")
    page.tab.wait_for_selector(drawing)
    assert page.wrong == []
    if has_uplot:  # a drag shows a part, and new points leave it
        box = page.tab.locator(".drawn .u-over").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.tab.mouse.move(box["x"] + box["width"] * 0.5, middle)
        page.tab.mouse.down()
        page.tab.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
        page.tab.mouse.up()
        write_metrics(run, [{"step": 101, "loss": 0.5}], more=True)
        page.wait_for("document.querySelector('.drawn').getAttribute('aria-label').includes('ends at 0.5')")
        loss.focus()
        page.tab.keyboard.press("Home")
        assert int(read.inner_text().split()[1].strip(":")) in range(49, 53)
        page.tab.keyboard.press("Escape")
        page.tab.keyboard.press("Home")
        assert read.inner_text() == "step 1: loss 100"


def test_the_page_follows_a_live_run_and_turns_grey_when_its_server_dies(
    browser: Any, runs: Path, tmp_path: Path
) -> None:
    """A real command under a real supervisor. It goes on when the test tells it to."""
    go_on = tmp_path / "go-on"
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "for step in range(1, 41):\n"
        "    print(f'step {step}/100 loss {5 / step:.3f}', flush=True); time.sleep(0.01)\n"
        f"while not os.path.exists({str(go_on)!r}): time.sleep(0.05)\n"
        "print('step 77/100 loss 0.077', flush=True)\n"
        f"while os.path.exists({str(go_on)!r}): time.sleep(0.05)\n"
    )
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "JACKLINE_RUNS": str(runs)}
    jackline = [sys.executable, "-m", "jackline"]
    command = [*jackline, "run", "--name", "live", "--detach", "--", sys.executable, str(script)]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=HANGS_S)
    served = Served(runs, tmp_path / "state")
    try:
        page = Page(browser, served)
        page.tab.wait_for_selector("table.runs")
        page.open("live")
        page.wait_for("document.querySelector('.verdict').textContent.includes('40 of 100 steps')")
        page.wait_for("document.querySelector('.drawn[aria-label^=Chart]') !== null")
        go_on.touch()
        page.wait_for("document.querySelector('.verdict').textContent.includes('77 of 100 steps')")
        page.wait_for("[...document.querySelectorAll('pre span')].some((one) => one.textContent.includes('step 77'))")
        page.tab.get_by_role("button", name="Look now").click()
        page.wait_for("[...document.querySelectorAll('pre')].some((one) => one.textContent.includes('train.py'))")
        go_on.unlink()
        page.wait_for("document.querySelector('.say').textContent.includes('Finished')")
        assert page.wrong == []
        served.process.kill()
        page.wait_for("document.body.classList.contains('lost')")
        assert page.tab.inner_text("#lost").startswith("No news since ")
        assert "Finished" in page.tab.inner_text(".say")  # what was known stays, marked as the past
    finally:
        served.close()
        subprocess.run([*jackline, "stop", "live"], env=env, capture_output=True, timeout=HANGS_S)


def test_since_you_last_looked_is_marked_and_another_site_learns_nothing(
    browser: Any, served: Served, runs: Path, tmp_path: Path
) -> None:
    run = RunDir(runs / "format1-finished")
    contents = json.loads(run.run_file.read_text())
    contents["name"] = name = "only-this-one"
    run.run_file.write_text(json.dumps(contents))
    page = Page(browser, served, color_scheme="dark")
    page.tab.wait_for_selector("table.runs")
    page.open(name)
    page.tab.wait_for_selector("ol.told li, main section p.dim")
    page.tab.get_by_role("link", name="Jackline").click()
    page.tab.wait_for_selector("table.runs")
    with open(run.supervisor_events, "a") as file:
        file.write(json.dumps({"at_s": time.time(), "event": "note", "text": "while you were away"}) + "\n")
    page.open(name)
    page.tab.wait_for_selector("li.since")
    assert "1 new above" in page.tab.inner_text("li.since")
    assert page.tab.locator("ol.told li").first.inner_text().endswith("while you were away")
    page.tab.reload()  # the token is kept for the tab
    page.tab.wait_for_selector(".cards .box")
    assert page.wrong == []

    other = browser.new_context().new_page()
    other.goto("data:text/html,<p>another site</p>")
    ask = "(address) => fetch(address, {mode: 'cors'}).then((one) => one.text()).catch(() => 'refused')"
    assert other.evaluate(ask, served.base + "api/runs") == "refused"
    assert other.evaluate(ask, served.base) == "refused"


@contextmanager
def notebook_proxy(served: Served, host: str) -> Iterator[str]:
    """The address under which a proxy shows the page: another Host and folder, one word added to each query, no
    cookies, no websockets. `/frame` shows it inside a page of the proxy."""
    folder = f"/user/me/proxy/{served.port}/"

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/frame":
                self.answer(
                    200, {"content-type": "text/html"}, f"<iframe src='{folder}#token={served.token}'>".encode()
                )
                return
            path = self.path.removeprefix(folder)
            address = served.base + path + ("&" if "?" in path else "?") + "authuser=0"
            left_out = ("host", "cookie", "connection", "accept-encoding", "upgrade", "origin")
            headers = {name: text for name, text in self.headers.items() if name.lower() not in left_out}
            asked = urllib.request.Request(address, headers={**headers, "Host": host})
            try:
                with urllib.request.urlopen(asked, timeout=HANGS_S) as found:
                    self.answer(found.status, dict(found.headers), found.read())
            except urllib.error.HTTPError as error:
                self.answer(error.code, dict(error.headers), error.read())

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, text in headers.items():
                if name.lower() not in ("content-length", "connection", "date", "set-cookie"):
                    self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_port}{folder}"
    finally:
        found.shutdown()
        found.server_close()


def test_behind_a_notebooks_proxy_the_page_works_also_in_a_frame(browser: Any, runs: Path, tmp_path: Path) -> None:
    served = Served(runs, tmp_path / "state", "--behind-proxy", "hub.example.org")
    try:
        served.get("api/runs")
        with notebook_proxy(served, "hub.example.org") as address:
            context = browser.new_context()
            context.set_default_timeout(HANGS_S * 1000)
            tab = context.new_page()
            tab.goto(f"{address}#token={served.token}")
            tab.locator("table.runs a").first.click()
            tab.wait_for_selector(".cards .box")
            tab.goto(address.partition("/user")[0] + "/frame")
            tab.frame_locator("iframe").locator("table.runs a").first.click()
            tab.frame_locator("iframe").locator(".cards .box").first.wait_for()
            assert tab.evaluate("document.cookie") == ""
        with notebook_proxy(served, "other.example.org") as address:  # a host that was not named
            answer = tab.goto(f"{address}#token={served.token}")
            assert answer is not None and answer.status == 403
        context.close()
    finally:
        served.close()

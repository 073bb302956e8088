"""The report: inert, redacted, readable for every kind of run, also a damaged one."""

from __future__ import annotations

import json
import re
import shutil
import struct
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from jackline.cli.pages.report import BROWSERS, command, find_browser
from jackline.errors import UsageError
from jackline.review.chart import Chart, Line, svg, thin, ticks
from jackline.review.document import to_html, to_markdown
from jackline.review.redact import HIDDEN, redact
from jackline.review.report import make_report
from jackline.review.summary import summarise
from jackline.rundir.layout import RunDir
from tests.rundir.made import make_run, this_process, write_start, write_state

GOLDEN = Path(__file__).parents[1] / "golden"
NOW = 1_794_100_000.0


class Seen(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def report_of(run: RunDir) -> str:
    return to_html(make_report(summarise(run, now_s=NOW)))


def copy_of(name: str, tmp_path: Path) -> RunDir:
    shutil.copytree(GOLDEN / name, tmp_path / name)
    return RunDir(tmp_path / name)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("format1-*")))
def test_every_recorded_run_has_a_report_without_script_or_address(name: str, tmp_path: Path) -> None:
    page = Seen(report_of(copy_of(name, tmp_path)))
    assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "a"}
    assert not [key for key, _ in page.attributes if key.startswith("on") or key in ("src", "href", "style")]
    assert any("default-src 'none'" in (value or "") for key, value in page.attributes if key == "content")
    for title in ("What ran", "Time", "Curves", "Memory", "What happened", "Next"):
        assert title in page.text


def test_a_run_that_failed_reads_as_a_post_mortem(tmp_path: Path) -> None:
    text = to_markdown(make_report(summarise(copy_of("format1-killed-oom", tmp_path), now_s=NOW)))
    for words in (
        "## Post-mortem",
        "| what happened | attempt 1 was ended by signal 9, 1 min after its start |",
        "the kernel killed it because memory ran out: the limit is 16.0 GiB (certain)",
        "what would have prevented it",
        "it was growing by 238 MiB/s in work/data.py:42 in load: rows.append(parse(line))",
    ):
        assert words in text, text


def test_what_to_do_next_claims_no_checkpoint_that_is_not_known_and_the_cost_is_told(tmp_path: Path) -> None:
    text = to_markdown(make_report(summarise(copy_of("format1-killed-oom", tmp_path), now_s=NOW), 3600.0))
    assert "| what was lost | everything since the start, as far as is known" in text
    assert "# as it was typed: no checkpoint of it is known here" in text
    assert "from its newest whole checkpoint" not in text
    assert "\nCost: 60.00, of which " in text, text


def test_an_incident_is_in_the_report_with_its_stacks_and_without_secrets(tmp_path: Path) -> None:
    run = copy_of("format1-finished", tmp_path)
    attempt = run.last_attempt()
    assert attempt is not None
    told = "STUCK (DEADLOCK) at 2026-11-16 15:05:07 UTC\n\nthe main thread waits for lock 'l' at train.py:28\n"
    frames = "".join(f"    /home/me/lib.py:{line} in f    token=hunter2secret\n" for line in range(300))
    (attempt.path / "incident-1.txt").write_text(f"{told}\nStacks\n{frames}\nNative stacks\n\n0x7f98624a3e96\n")
    text = to_markdown(make_report(summarise(run, now_s=NOW)))
    assert "## Incidents" in text and "waits for lock 'l' at train.py:28" in text
    assert "~/lib.py:0 in f" in text and "more lines in the run's folder" in text
    assert not [word for word in ("hunter2secret", "/home/me", "0x7f98624a3e96") if word in text]


def test_the_settings_of_a_recipe_are_in_the_report_and_their_secrets_are_not(tmp_path: Path) -> None:
    run = copy_of("format1-finished", tmp_path)
    assert "## Config" not in to_markdown(make_report(summarise(run, now_s=NOW)))
    lines = ["lr: 0.0003   # quick", "tokenizer: bytes", "api_key: hunter2secret", "data: /home/me/texts"]
    run.config_file.write_text("\n".join([*lines, *(f"x{number}: 1" for number in range(500))]))
    text = to_markdown(make_report(summarise(run, now_s=NOW)))
    assert "lr: 0.0003   # quick\ntokenizer: bytes\napi_key: ***\ndata: ~/texts\nx0: 1\n" in text
    assert "... 204 more lines" in text and "hunter2secret" not in text


def test_a_run_that_is_stuck_is_not_only_said_to_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    write_start(run, this_process())
    verdict = {"kind": "STUCK", "for_s": 720.0, "text": "waiting for a lock"}
    write_state(run, this_process(), attempt=1, child=this_process().to_json(), verdict=verdict)
    assert make_report(summarise(run, now_s=time.time())).title == "mine: running, but STUCK for 12 min"


def test_what_a_run_says_stays_text(tmp_path: Path) -> None:
    run = copy_of("format1-finished", tmp_path)
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    contents = json.loads(run.run_file.read_text())
    contents.update(argv=["python", evil], cwd=evil, versions={evil: evil})
    run.run_file.write_text(json.dumps(contents))
    with open(run.metrics(), "w") as file:
        for step in range(5):
            file.write(json.dumps({"step": step, "at_s": NOW, evil: 1.0 * step}) + "\n")
    with open(run.supervisor_events, "a") as file:
        file.write(json.dumps({"at_s": NOW, "event": "note", "text": evil}) + "\n")
    page = Seen(report_of(run))
    assert not page.tags & {"script", "img"}
    assert evil in page.text
    assert "<script>" not in to_markdown(make_report(summarise(run, now_s=NOW)))


@pytest.mark.parametrize("damage", ["", "[1]", "{", "null", '{"format": 99}'])
def test_a_damaged_run_still_has_a_report(damage: str, tmp_path: Path) -> None:
    run = copy_of("format1-killed-oom", tmp_path)
    for path in (run.run_file, run.supervisor_file, run.attempt(1).exit_file, run.supervisor_events):
        path.write_text(damage)
    (run.path / "timeline.jsonl").write_text(damage)
    assert "</html>" in report_of(run)


@pytest.mark.parametrize("value", [5, None, {"a": 1}, [3, None], "text"])
def test_findings_of_another_shape_still_have_a_report(value: object, tmp_path: Path) -> None:
    run = copy_of("format1-killed-oom", tmp_path)
    ending = json.loads(run.attempt(1).exit_file.read_text())
    ending["findings"] = [{"cause": value, "title": value, "detail": value, "hint": value, "confidence": value}]
    ending["evidence"]["output_tail"] = value
    run.attempt(1).exit_file.write_text(json.dumps(ending))
    assert "</html>" in report_of(run)


def test_secrets_and_home_folders_are_hidden() -> None:
    for secret in (
        "HF_TOKEN=hf_abcdefghijkl",
        "--api-key sk-0123456789abcdef",
        "--wandb_api_key=0123456789abcdef",
        "Authorization: Bearer abcdefgh12345678",
        "https://anna:hunter22@host/path",
        "s3://bucket/x?X-Amz-Signature=abcdef0123",
        "ghp_0123456789abcdefABCDEF",
        '"password": "hunter22"',
        "AKIAIOSFODNN7EXAMPLE",
    ):
        hidden = redact(f"before {secret} after")
        assert HIDDEN in hidden, hidden
        for part in ("hf_abc", "sk-012", "0123456789abcdef", "12345678", "hunter22", "abcdef0123", "AKIA"):
            assert part not in hidden, hidden
        assert hidden.startswith("before ") and hidden.endswith(" after")
    for harmless in (
        "tokenizer: bytes",
        "--tokenizer gpt2",
        "tokenizer_path=/data/tok.json",
        "val_tokens: 10000000",
        '"max_new_tokens": 512,',
        "tokens=1.5e9",
        "--tokens-per-chunk 512",
        "tokens_per_second: 548192.3",
        "eos_token_id: 50256",
        "pad_token='<pad>'",
        "use_auth_token=False",
    ):
        assert redact(f"before {harmless} after") == f"before {harmless} after"
    for secret in (
        "token: 123456789012",
        "HF_TOKEN=abcdef",
        "tokens: abc12345,def",
        "api_tokens=1a2b3c4d",
        "token=12ab",
    ):
        name, value = re.split(r"[:=] ?", secret)
        assert value.split(",")[0] not in redact(secret) and redact(secret).startswith(name)
    assert redact("/home/anna/data/x.py") == "~/data/x.py"
    assert redact("loss 2.31 at step 40, tokens 512, lr=3e-4") == "loss 2.31 at step 40, tokens 512, lr=3e-4"


def test_no_peak_is_lost_when_a_million_points_are_thinned() -> None:
    spots = [(float(step), 1.0) for step in range(1_000_000)]
    spots[123_456] = (123_456.0, 99.0)
    spots[700_001] = (700_001.0, -5.0)
    kept = thin(spots)
    assert len(kept) <= 3 * 600
    assert (123_456.0, 99.0) in kept and (700_001.0, -5.0) in kept
    assert kept == sorted(kept)


def test_charts_survive_what_training_produces() -> None:
    nan = float("nan")
    assert svg(Chart("empty", (Line("x", ()),))) == ""
    assert svg(Chart("nan", (Line("x", ((0.0, nan), (1.0, float("inf")))),))) == ""
    one = svg(Chart("one", (Line("x", ((5.0, 2.0),)),)))
    assert "<circle" in one
    flat = svg(Chart("flat", (Line("x", ((0.0, 2.0), (1.0, nan), (2.0, 2.0))),)))
    assert "nan" not in flat and "<polyline" in flat
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.5, 1.0])
    assert ticks(3.0, 3.0) == [3.0]


def test_a_long_run_has_a_small_report(tmp_path: Path) -> None:
    run = copy_of("format1-finished", tmp_path)
    with open(run.metrics(), "w") as file:
        for step in range(100_000):
            file.write(f'{{"step":{step},"at_s":{NOW + step},"loss":{2.5 - step / 1e5},"lr":0.001}}\n')
    began_s = time.process_time()
    page = report_of(run)
    spent_s = time.process_time() - began_s
    assert len(page.encode()) <= 1 << 20
    print(f"report of 100,000 steps: {len(page) / 1024:.0f} KiB, {spent_s:.2f} s of CPU")


def test_a_picture_shows_the_whole_page(tmp_path: Path) -> None:
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("no chromium or Chrome is installed here")
    folder = tmp_path / "runs"
    shutil.copytree(GOLDEN / "format1-killed-oom", folder / "format1-killed-oom")
    words = ["format1-killed-oom", "--png", "--out", str(tmp_path / "x.png"), "--runs-dir", str(folder)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    data = (tmp_path / "x.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    wide, high = struct.unpack(">II", data[16:24])
    assert wide == 900 and high > 1000  # more than the window it was measured in


def test_without_a_browser_a_picture_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JACKLINE_BROWSER", raising=False)
    with pytest.raises(UsageError) as error:
        find_browser()
    assert str(error.value) == (
        "error: --png needs a browser, and none of chromium, chromium-browser, google-chrome, google-chrome-stable, "
        "microsoft-edge, brave-browser is installed\n"
        "hint: apt install chromium, or set JACKLINE_BROWSER; without --png the report is a page for any browser"
    )

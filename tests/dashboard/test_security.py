"""One test for each promise of docs/guides/dash.md, "What it promises"."""

from __future__ import annotations

import ast
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from jackline.cli.pages.told import RunTeller
from jackline.dashboard import tails
from jackline.dashboard.guard import NAME, Rules, is_our_host, is_proxy_host, read_token
from jackline.dashboard.server import PARTS, STATIC, make_app
from jackline.dashboard.views import Site
from jackline.rundir.layout import RunDir
from tests.dashboard.asking import HOST, PORT, TOKEN, Served, ask

pytest.importorskip("starlette", reason="the extra 'dash' is not installed")
STATIC_FOLDER = Path(__file__).parents[2] / "src/jackline/dashboard/static"
DATA = ("/api/runs", "/api/runs/{key}", *(f"/api/runs/{{key}}/{part}" for part in PARTS if part))


def test_it_listens_on_the_loopback_address_alone_and_keeps_no_log_of_addresses(served: Served) -> None:
    assert '"is_live"' in served.get("api/runs?secret=in-the-query")
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == served.port:
                found.append(local.rpartition(":")[0])
    assert found == ["0100007F"]
    assert served.end() in (0, 130)
    errors = served.errors.read_text()
    assert served.token not in errors and "secret" not in errors and "Traceback" not in errors


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get", "BREW"])
def test_it_only_reads(app: Any, key: str, method: str) -> None:
    for address in (*STATIC, *DATA, "/nothing"):
        assert ask(app, address.format(key=key), method=method).status == 405


def test_head_is_answered_as_get(app: Any) -> None:
    assert ask(app, "/", method="HEAD").status == 200


def test_these_addresses_exist_and_no_other(app: Any) -> None:
    found = sorted(route.path for route in app.routes)
    assert found == sorted(["/api/runs", "/api/runs/{key}", "/api/runs/{key}/{part}", *STATIC])


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "t", TOKEN.upper()])
def test_data_needs_the_token(app: Any, key: str, token: str | None) -> None:
    for address in DATA:
        answer = ask(app, address.format(key=key), token=token)
        assert answer.status == 401 and "is_live" not in answer.text and "lines" not in answer.text


def test_the_token_counts_only_in_its_header(app: Any) -> None:
    for address in (f"/api/runs?token={TOKEN}", f"/api/runs?x-jackline-token={TOKEN}"):
        assert ask(app, address, token=None).status == 401
    for headers in ({"Authorization": f"Bearer {TOKEN}"}, {"Cookie": f"x-jackline-token={TOKEN}"}):
        assert ask(app, "/api/runs", token=None, headers=headers).status == 401


def test_the_page_itself_holds_no_data_and_no_token(app: Any) -> None:
    for address in STATIC:
        answer = ask(app, address, token=None)
        assert answer.status == 200 and TOKEN not in answer.text


def test_the_token_file_is_private_and_kept(tmp_path: Path) -> None:
    token = read_token(tmp_path / "state")
    path = tmp_path / "state" / NAME
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(tmp_path / "state") == token
    assert read_token(tmp_path / "state", is_new=True) != token


def test_a_token_file_that_others_could_read_or_made_is_replaced(tmp_path: Path) -> None:
    token = read_token(tmp_path)
    (tmp_path / NAME).chmod(0o644)
    second = read_token(tmp_path)
    assert second != token and stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    (tmp_path / "elsewhere").write_text("e" * 43)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    assert read_token(tmp_path) != "e" * 43
    assert (tmp_path / "elsewhere").read_text() == "e" * 43 and not (tmp_path / NAME).is_symlink()


OTHER_HOSTS = [
    "evil.com", "evil.com:7654", "127.0.0.1.evil.com:7654", "localhost:9", "localhost", "127.0.0.1", "",
    "127.0.0.1:7654/api", "127.0.0.1:7654@evil.com", "evil.com#127.0.0.1:7654", "0.0.0.0:7654", "127.1:7654",
    "localhost.:7654", "127.0.0.1:07654", "127.0.0.1:7654 ", "127.0.0.1:7654,evil.com", "[::1]",
    "[::ffff:127.0.0.1]:7654",
]  # fmt: skip


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_another_host_is_refused(app: Any, host: str) -> None:
    for address in ("/", "/api/runs"):
        assert ask(app, address, hosts=(host,)).status == 403


def test_no_host_and_two_hosts_are_refused(app: Any) -> None:
    assert ask(app, "/api/runs", hosts=()).status == 403
    assert ask(app, "/api/runs", hosts=(HOST, "evil.com")).status == 403
    assert ask(app, "/api/runs", hosts=(HOST, HOST)).status == 403


@pytest.mark.parametrize("host", [HOST, "localhost:7654", "LOCALHOST:7654", "[::1]:7654"])
def test_our_own_hosts_are_served(app: Any, host: str) -> None:
    assert ask(app, "/api/runs", hosts=(host,)).status == 200


def test_behind_a_proxy_only_the_named_hosts_are_served_as_well(site: Site) -> None:
    rules = Rules(TOKEN, PORT, ("hub.example.org", "*.prod.example.net"))
    app = make_app(site, rules)
    for host in ("hub.example.org", "hub.example.org:443", "a-1.prod.example.net", HOST):
        assert ask(app, "/api/runs?authuser=0", hosts=(host,)).status == 200, host
    for host in (
        "evil.com",
        "prod.example.net",
        "x.hub.example.org",
        "a.prod.example.net.evil.com",
        "evil.com/.prod.example.net",
    ):
        assert ask(app, "/api/runs", hosts=(host,)).status == 403, host
    assert ask(app, "/api/runs", hosts=("hub.example.org",), token=None).status == 401
    origin = {"Origin": "https://hub.example.org", "Sec-Fetch-Site": "same-origin"}
    assert ask(app, "/api/runs", hosts=("hub.example.org",), headers=origin).status == 200
    policy = ask(app, "/").header("content-security-policy")
    assert "frame-ancestors 'self' https://hub.example.org https://*.prod.example.net" in policy


@pytest.mark.parametrize("text", ["*", "*.com", "https://x.org", "x.org/path", "x y", "*.*.org", "", "-x.org", "a;b"])
def test_a_proxy_host_that_would_open_too_much_is_refused(text: str) -> None:
    assert not is_proxy_host(text)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.com"}, {"Origin": "null"}, {"Origin": f"http://evil.com:{PORT}"}, {"Origin": "http://127.0.0.1:9"},
        {"Origin": f"file://{HOST}"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)  # fmt: skip
def test_data_is_refused_to_other_sites(app: Any, headers: dict[str, str]) -> None:
    answer = ask(app, "/api/runs", headers=headers)
    assert answer.status == 403
    assert not [name for name, _ in answer.headers if name.startswith("access-control")]


def test_a_link_to_the_page_can_be_followed(app: Any) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(app, "/", headers=link, token=None).status == 200
    assert ask(app, "/app.js", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}).status == 403


@pytest.mark.parametrize("address", ["/", "/app.js", "/api/runs", "/api/nothing", "/nothing"])
@pytest.mark.parametrize("token", [TOKEN, None])
def test_every_answer_has_the_headers(app: Any, address: str, token: str | None) -> None:
    answer = ask(app, address, token=token)
    assert answer.header("content-security-policy") == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert answer.header("x-content-type-options") == "nosniff"
    assert answer.header("referrer-policy") == "no-referrer"
    assert answer.header("cache-control") == "no-store"
    names = {name for name, _ in answer.headers}
    assert not names & {"access-control-allow-origin", "set-cookie", "server", "location"}


EVIL_KEYS = [
    "..", "../..", "%2e%2e", "%252e%252e", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "//etc/passwd", "%00",
    "format1-finished", "static", "a%00b", "~", ".", "....//", "..\\..", "%5c..", "#", "x" * 5000, "é",
    "%c0%ae%c0%ae",
]  # fmt: skip


@pytest.mark.parametrize("key", EVIL_KEYS)
def test_a_run_is_looked_up_in_a_list_and_never_joined_to_a_path(app: Any, key: str) -> None:
    for address in (f"/api/runs/{key}", f"/api/runs/{key}/log", f"/{key}", f"/static/{key}"):
        answer = ask(app, address)
        assert answer.status in (404, 414) and "root:" not in answer.text


def test_an_unknown_part_of_a_run_is_not_there(app: Any, key: str) -> None:
    for part in ("run.json", "checkpoints/latest", "lock", "__class__", "raw.out"):
        assert ask(app, f"/api/runs/{key}/{part}").status == 404


def test_only_plain_files_of_the_run_are_read(app: Any, finished: RunDir, key: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text('{"step": 1, "leaked": 2}\nleaked line\n')
    for path in (
        finished.out_log,
        finished.config_file,
        finished.metrics(),
        finished.supervisor_events,
        finished.timeline,
    ):
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
    os.mkfifo(finished.printed_metrics)  # a reader would wait for ever
    finished.session_file().unlink(missing_ok=True)
    os.mkfifo(finished.session_file())
    for address in DATA:
        answer = ask(app, address.format(key=key))
        assert answer.status == 200 and "leaked" not in answer.text, address


def test_nothing_a_run_holds_is_executed_or_unpickled(app: Any, finished: RunDir, key: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    finished.config_file.write_text(f"!!python/object/apply:os.system ['touch {mark}']\n")
    (finished.path / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    for address in DATA:
        assert ask(app, address.format(key=key)).status == 200
    assert not mark.exists()
    for path in Path(tails.__file__).parent.glob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"system", "Popen", "unlink", "rmtree", "write_text", "kill", "check_output"}, path


def test_answers_are_bounded_however_large_the_files_are(app: Any, finished: RunDir, key: str) -> None:
    with open(finished.out_log, "w") as file:
        file.truncate(20 << 30)  # a sparse file: 20 GiB to a reader
        file.seek(20 << 30)
        file.write("\nthe last line\n" + "x" * 300_000 + "\nend\n")
    finished.config_file.write_text("a: " + "b" * (8 << 20))
    with open(finished.metrics(), "w") as file:
        for number in range(3000):
            file.write(f'{{"step": {number}, "name-{number}": 1}}\n')
    sizes = {address: len(ask(app, address.format(key=key)).text) for address in DATA}
    assert max(sizes.values()) < 1 << 20, sizes
    assert '"end"' in ask(app, f"/api/runs/{key}/log").text
    found = ask(app, f"/api/runs/{key}/log?find=the%20last").json
    assert found["lines"] == ["the last line"] and found["searched_bytes"] <= tails.SEARCHED_BYTES


def test_a_very_long_address_is_refused(app: Any) -> None:
    assert ask(app, "/api/runs?since=" + "1" * 5000).status == 414


def test_secrets_are_hidden_and_cannot_be_searched_for(app: Any, finished: RunDir, key: str) -> None:
    finished.out_log.write_text("login with hf_abcdefghijklmnop1234\nHF_TOKEN=verysecret12\nhttps://me:pw@host/x\n")
    finished.config_file.write_text("wandb_api_key: 0123456789abcdef\nlr: 3\n")
    for address in (f"/api/runs/{key}/log", f"/api/runs/{key}/config", f"/api/runs/{key}/log?find=h"):
        text = ask(app, address).text
        assert not [word for word in ("hf_abc", "verysecret", "me:pw", "0123456789abcdef") if word in text], address
    assert ask(app, f"/api/runs/{key}/log?find=hf_abc").json["lines"] == []
    assert "lr: 3" in ask(app, f"/api/runs/{key}/config").text


def test_control_characters_do_not_reach_the_page(app: Any, finished: RunDir, key: str) -> None:
    finished.out_log.write_text("a\x1b[2Jb\x1b]0;title\x07c\u202ed\x00e\n")
    assert ask(app, f"/api/runs/{key}/log").json["lines"] == ["abcde"]


def test_the_page_puts_text_in_as_text_and_loads_nothing_from_elsewhere() -> None:
    for name in ("app.js", "charts.js", "plots.js"):
        text = (STATIC_FOLDER / name).read_text()
        assert not re.search(r"\.(?:inner|outer)HTML\s*[+]?=[^=]|document\.write|\beval\(|new Function", text), name
        assert not re.search(r"insertAdjacentHTML|setHTML|srcdoc|DOMParser|createContextualFragment", text), name
    for path in STATIC_FOLDER.iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"' )]*", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
    page = (STATIC_FOLDER / "index.html").read_text()
    assert "<style" not in page and " on" not in re.sub(r">[^<]*<", "><", page) and page.count("<script ") == 2
    assert page.count("<script") == 2 and '<script src="uplot.js" defer></script>' in page


def test_a_websocket_is_refused(app: Any) -> None:
    import asyncio

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/api/runs", "raw_path": b"/api/runs", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert "websocket.accept" not in [message["type"] for message in sent]


def test_the_host_rules_are_about_whole_names() -> None:
    rules = Rules(TOKEN, PORT, ("*.example.org",))
    assert is_our_host(rules, "a.example.org") and not is_our_host(rules, "aexample.org")
    assert isinstance(RunTeller().stacks(RunDir(Path("/nonexistent"))), tuple)

"""uPlot comes into the wheel when it is built, unchanged or not at all; the page is light with it."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jackline.dashboard import server
from jackline.dashboard.guard import Rules
from jackline.dashboard.views import Site
from tests.dashboard.asking import PORT, TOKEN, ask

ROOT = Path(__file__).parents[2]
LIGHT_BYTES = 150_000


def build_script() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(script: str = "var uPlot") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in (
            ("package/dist/uPlot.iife.min.js", script),
            ("package/dist/uPlot.min.css", ".uplot {}"),
            ("package/LICENSE", "MIT"),
            ("package/README.md", "not kept"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


@pytest.fixture
def registry() -> Iterator[str]:
    """Answers each address with the same package."""
    packed = package()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(packed)

        def log_message(self, *words: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_the_package_is_taken_from_a_registry_and_only_with_the_pinned_hash(registry: str, tmp_path: Path) -> None:
    build = build_script()
    digest = hashlib.sha256(package()).hexdigest()
    found = build.fetch(registry + "/uplot.tgz", sha256=digest)
    assert found == {"uPlot.js": b"var uPlot", "uPlot.css": b".uplot {}", "LICENSE": b"MIT"}
    build.put(tmp_path / "uplot", found)
    assert sorted(path.name for path in (tmp_path / "uplot").iterdir()) == ["LICENSE", "uPlot.css", "uPlot.js"]
    with pytest.raises(build.CannotFetch, match="is another file than uPlot"):
        build.fetch(registry + "/uplot.tgz")  # not the real one
    with pytest.raises(build.CannotFetch, match="cannot be read"):
        build.fetch(str(tmp_path / "nothing.tgz"))


def test_a_registry_that_does_not_answer_ends_in_words(tmp_path: Path) -> None:
    build = build_script()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/uplot.tgz"
        with pytest.raises(build.CannotFetch, match="cannot be read"):
            build.fetch(address, wait_s=0.2)
    with pytest.raises(build.CannotFetch, match="cannot be read"):
        build.fetch(address)  # nobody listens there any more


def test_where_it_comes_from_can_be_chosen() -> None:
    build = build_script()
    assert build.source_of({"npm_config_registry": "http://x/"}) == "http://x/uplot/-/uplot-1.6.32.tgz"
    assert build.source_of({"JACKLINE_UPLOT": "/tmp/u.tgz"}) == "/tmp/u.tgz"
    assert build.source_of({"JACKLINE_UPLOT": "off"}) == ""
    assert not build.is_complete(Path("/nonexistent"))


def test_it_is_not_kept_in_the_repository() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert {name for name in done.stdout.split() if "uplot" in name.lower()} <= {"tests/dashboard/test_uplot.py"}


def test_the_page_without_it_has_empty_files_in_its_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="the extra 'dash' is not installed")
    real = server._contents
    monkeypatch.setattr(server, "_contents", lambda name: b"" if name.startswith("uplot/") else real(name))
    app = server.make_app(site, Rules(TOKEN, PORT))
    for address in ("/uplot.js", "/uplot.css"):
        found = ask(app, address)
        assert (found.status, found.text) == (200, "")
    with pytest.raises(OSError):
        real("static/nothing.js")
    assert real("uplot/nothing.js") == b""


def test_the_first_load_weighs_little() -> None:
    """Every file of the page, packed as the server packs it; with uPlot where it is installed, else with its size."""
    weights = [len(gzip.compress(server._contents(name), 9)) for name, _ in server.STATIC.values()]
    uplot = 0 if server._contents("uplot/uPlot.js") else 23_000
    assert sum(weights) + uplot <= LIGHT_BYTES


def test_without_npm_and_without_a_registry_the_package_is_built_without_uplot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_script()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CannotFetch, match="no registry is known"):
        build.source_of({})
    (tmp_path / "npm").write_text("#!/bin/sh\necho http://mine.example/\n")
    (tmp_path / "npm").chmod(0o755)
    assert build.source_of({}) == "http://mine.example/uplot/-/uplot-1.6.32.tgz"

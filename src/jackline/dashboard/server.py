"""The HTTP server of `jackline dash`: loopback only, reading only, every request checked by guard.py.

Owns the routes. Needs the extra `dash` (starlette, uvicorn), which is imported when a server is made.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jackline.dashboard.guard import Refusal, Rules, answer_headers, refuse
from jackline.dashboard.views import Kept, Site
from jackline.rundir.access.secrets import hide_in

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PACKAGES = ("starlette", "uvicorn")
LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 64
GZIP_ABOVE = 600
MAX_WORD = 100
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
STATIC = {
    "/": ("static/index.html", "text/html; charset=utf-8"),
    "/app.js": ("static/app.js", _SCRIPT),
    "/charts.js": ("static/charts.js", _SCRIPT),
    "/plots.js": ("static/plots.js", _SCRIPT),
    "/app.css": ("static/app.css", _STYLE),
    "/icon.svg": ("static/icon.svg", "image/svg+xml"),
    # Put there by hatch_build.py, which may have had no network: then these are empty and charts.js draws.
    "/uplot.js": ("uplot/uPlot.js", _SCRIPT),
    "/uplot.css": ("uplot/uPlot.css", _STYLE),
}
# What may be asked about one run: the last word of the address, and who answers.
PARTS: dict[str, Callable[[Site, Kept, Any], dict[str, Any]]] = {
    "": lambda site, kept, asked: site.run_json(kept, time.time()),
    "curves": lambda site, kept, asked: site.curves_json(kept, asked.get("since", "")),
    "events": lambda site, kept, asked: site.events_json(kept, asked.get("since", "")),
    "log": lambda site, kept, asked: site.log_json(
        kept, _offset(asked.get("since")), asked.get("find", "")[:MAX_WORD]
    ),
    "stacks": lambda site, kept, asked: site.stacks_json(kept),
    "config": lambda site, kept, asked: site.config_json(kept),
    "diff": lambda site, kept, asked: site.diff_json(kept, asked.get("with", "")),
    "checkpoints": lambda site, kept, asked: site.checkpoints_json(kept),
}


def make_app(site: Site, rules: Rules) -> Starlette:
    """All addresses that exist are in this function; everything else is 404."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    def list_runs(request: Request) -> Response:
        return _json(request, site.runs_json(time.time()))

    def one_run(request: Request) -> Response:
        kept = site.find(request.path_params["key"])
        answer = PARTS.get(request.path_params.get("part", ""))
        if kept is None or answer is None:
            return _text(404, "there is no such run")
        return _json(request, answer(site, kept, request.query_params))

    routes = [
        Route("/api/runs", list_runs, methods=["GET"]),
        Route("/api/runs/{key}", one_run, methods=["GET"]),
        Route("/api/runs/{key}/{part}", one_run, methods=["GET"]),
    ]
    for path, (name, kind) in STATIC.items():
        contents = _contents(name)
        routes.append(Route(path, partial(_static, contents, gzip.compress(contents, 9), kind), methods=["GET"]))
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # a redirect would be built from the Host header
    app.add_middleware(_Checked, rules=rules)
    return app


def _contents(name: str) -> bytes:
    try:
        return files("jackline.dashboard").joinpath(*name.split("/")).read_bytes()
    except OSError:
        if name.startswith("uplot/"):
            return b""
        raise


class _Checked:
    """Every request passes guard.refuse before anything else sees it; every answer gets the headers."""

    def __init__(self, app: Any, rules: Rules) -> None:
        self.app = app
        self._rules = rules
        self._headers = [(name.encode(), value.encode()) for name, value in answer_headers(rules).items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_checked(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in self._headers}
                kept = [pair for pair in message.get("headers", []) if pair[0].lower() not in own]
                message = {**message, "headers": kept + self._headers}
            await send(message)

        refusal = self._refusal(scope)
        answer = self.app if refusal is None else _text(refusal.status, refusal.why)
        await answer(scope, receive, send_checked)

    def _refusal(self, scope: Any) -> Refusal | None:
        if scope["type"] != "http":
            return Refusal(403, "only plain requests are answered")
        path, raw = scope["path"], scope.get("raw_path") or b""
        if b"%" in raw or "\\" in path or ".." in path or not path.isascii():
            return Refusal(404, "there is no such page")
        return refuse(
            self._rules,
            method=scope["method"],
            path=path,
            query=scope.get("query_string", b""),
            headers=scope["headers"],
        )


async def _static(plain: bytes, small: bytes, kind: str, request: Request) -> Response:
    from starlette.responses import Response

    if _takes_gzip(request):
        return Response(small, media_type=kind, headers={"content-encoding": "gzip"})
    return Response(plain, media_type=kind)


def to_body(value: Any) -> bytes:
    """An answer as it is sent: no password of a URL leaves this process."""
    text = json.dumps(hide_in(value), separators=(",", ":"), allow_nan=False, default=str, ensure_ascii=False)
    return text.encode("utf-8", "replace")  # a damaged file may hold half a character


def _json(request: Request, value: Any) -> Response:
    from starlette.responses import Response

    body = to_body(value)
    if len(body) > GZIP_ABOVE and _takes_gzip(request):
        packed = gzip.compress(body, 5)
        return Response(packed, media_type="application/json", headers={"content-encoding": "gzip"})
    return Response(body, media_type="application/json")


def _text(status: int, text: str) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text + "\n", status)


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _offset(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,15}", text) else None


def listen(port: int) -> socket.socket:
    """A listening socket on the loopback address; port 0 takes a free one. Raises OSError."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((LOOPBACK, port))
        found.listen(128)
    except BaseException:
        found.close()
        raise
    return found


def serve(app: Starlette, listening: socket.socket) -> None:
    """Until SIGINT or SIGTERM. There is no access log, so that no address is kept anywhere."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=16 << 10,
    )
    uvicorn.Server(config).run(sockets=[listening])

"""stop-request.json: written before SIGTERM, so that a requested stop can be told from another SIGTERM."""

from __future__ import annotations

from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.fields import decode, encode, left_out


@immutable
class StopRequest:
    """`by` is a text that says who asks; `grace_s` is how long the stop may take, None for the run's own setting."""

    at_s: float | None = None
    by: str | None = None
    grace_s: float | None = None
    asker: ProcessId | None = None
    signal: int | None = left_out()  # SIGINT where that was asked for; None: SIGTERM

    @staticmethod
    def from_json(raw: object) -> StopRequest:
        return decode(StopRequest, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def read_stop_request(run: RunDir) -> StopRequest:
    return StopRequest.from_json(atomic.read_json(run.stop_request))


def write_stop_request(run: RunDir, request: StopRequest) -> None:
    atomic.write_json(run.stop_request, request.to_json())

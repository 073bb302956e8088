"""What a person chose for the supervision of one run, as the supervisor needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class SuperviseOptions:
    """Defaults are those of `jackline run` for a stranger's command."""

    restart: int = 0
    on_stuck: str = "report"  # report | restart | stop
    resume_arg: str | None = None
    checkpoints: str | None = None
    time_limit_s: float | None = None
    grace_s: float = 30.0
    on_event: str | None = None
    when_done: str | None = None
    tty: bool = False
    split_streams: bool = False
    quiet_after_s: float = 2.0
    stuck_after_s: float = 60.0
    inject: bool = True
    mirror: str | None = None
    is_terminal: bool = False
    columns: int = 80
    rows: int = 24

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SuperviseOptions:
        known = {field.name for field in fields(SuperviseOptions)}
        return SuperviseOptions(**{name: entry for name, entry in value.items() if name in known})

"""What a person chose for the supervision of one run, as the supervisor needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jackline.rundir.records.fields import decode


@dataclass(frozen=True)
class SuperviseOptions:
    """Defaults are those of `jackline run` for a stranger's command. `..._attached` counts once the script has
    attached (`jackline.attach`), because it can then go on exactly; None: as for a stranger's."""

    restart: int = 0
    on_stuck: str = "report"  # report | restart | stop
    restart_attached: int | None = None
    on_stuck_attached: str | None = None
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
    start_from: str | None = None  # `resume --from PATH`: for the next attempt alone
    from_scratch: bool = False  # `resume --from-scratch`: likewise
    typed: str = ""  # after `jackline`, options and all; only of `jackline train`, whose trainer repeats it

    def for_session(self, is_attached: bool) -> SuperviseOptions:
        """What holds now."""
        if not is_attached:
            return self
        restart = self.restart if self.restart_attached is None else self.restart_attached
        return replace(self, restart=restart, on_stuck=self.on_stuck_attached or self.on_stuck)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SuperviseOptions:
        """What cannot be read keeps its default."""
        return decode(SuperviseOptions, value)

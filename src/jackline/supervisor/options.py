"""The user's options for the supervision of one run, as the supervisor needs them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.rundir.access.secrets import HIDDEN, hide_in
from jackline.rundir.records.fields import decode


@immutable
class SuperviseOptions:
    """Defaults are those of `jackline run` for a user's own command. `..._attached` applies once the script has
    attached (`jackline.attach`), because it can then resume exactly; None means the same as without attach."""

    restart: int = 0
    on_stuck: str = "report"  # report | restart | stop
    restart_attached: int | None = None
    on_stuck_attached: str | None = None
    on_stuck_ranks: str | None = None  # of a collective that hangs, where on_stuck only reports
    resume_arg: str | None = None
    checkpoints: str | None = None
    time_limit_s: float | None = None
    grace_s: float = 30.0
    on_event: str | None = None
    when_done: str | None = None
    tty: bool = False
    split_streams: bool = False
    all_ranks: bool = False  # show the output of every rank, instead of a file for each but the first
    quiet_after_s: float = 2.0
    stuck_after_s: float = 60.0
    inject: bool = True
    rescue: bool = False  # save the state of a script that has not attached when it crashes, hangs or is stopped
    rescue_every_s: float | None = None
    mirror: str | None = None
    disk_budget: int | None = None
    mirror_patience_s: float = 600.0
    is_terminal: bool = False
    is_live: bool = False  # shown by a live view, or by none: not printed into a pipe or a file
    columns: int = 80
    rows: int = 24
    start_from: str | None = None  # `resume --from PATH`: only for the next attempt
    from_scratch: bool = False  # `resume --from-scratch`: likewise
    job: str = ""  # of several machines: the folder that all of them see, for its checkpoints
    typed: str = ""  # the command line after `jackline`; only for `jackline train`, whose trainer prints it

    def for_session(self, is_attached: bool) -> SuperviseOptions:
        """The options that apply now."""
        if not is_attached:
            return self
        restart = self.restart if self.restart_attached is None else self.restart_attached
        return replace(self, restart=restart, on_stuck=self.on_stuck_attached or self.on_stuck)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_stored(self) -> dict[str, Any]:
        """The same for the files of a run, which may be copied to a mirror or sent to somebody: without passwords."""
        return _stored(self)

    def with_secrets(self, told: Mapping[str, Any]) -> SuperviseOptions:
        """Put back what `to_stored` has hidden, from options of the same run that have it. A hook whose password is
        unknown is dropped; without the mirror's, nothing would be uploaded, so that is an error."""
        now = self.to_json()
        known = {name: told[name] for name, value in now.items() if name in told and hide_in(told[name]) == value}
        found = SuperviseOptions.from_json({**now, **known})
        if found.mirror is not None and HIDDEN in found.mirror:
            raise UsageError(
                f"the password of its mirror {found.mirror} is not stored with the run",
                hint="name it with its password: jackline resume URL, or give --mirror URL to the command again",
            )
        hooks = {name: None for name in ("on_event", "when_done") if HIDDEN in (getattr(found, name) or "")}
        return replace(found, **hooks)  # type: ignore[arg-type]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SuperviseOptions:
        """A field that cannot be read keeps its default."""
        return decode(SuperviseOptions, value)


@functools.lru_cache(maxsize=4)  # written each second, and hardly ever different
def _stored(options: SuperviseOptions) -> dict[str, Any]:
    stored: dict[str, Any] = hide_in(options.to_json())
    return stored

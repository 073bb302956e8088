"""The stranger's own checkpoints, as far as the supervisor cares: a sign of progress and where to go on from.

Owns which of them were tried and failed. How one is checked is find.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jackline.machine.proc import open_files
from jackline.machine.readings import TreeReading
from jackline.rundir.layout import RunDir
from jackline.rundir.records.exit import read_exit
from jackline.rundir.records.session import read_session
from jackline.supervisor.foreign.find import ForeignCheckpoint, choose, list_checkpoints, resume_argv
from jackline.supervisor.options import SuperviseOptions

LOOK_EVERY_S = 5.0


class CheckpointsSeen:
    """Live state over the attempts of one run."""

    def __init__(self, run: RunDir, options: SuperviseOptions, *, cwd: Path, since_s: float) -> None:
        self._run = run
        self._options = options
        self._cwd = cwd
        self._since_s = since_s
        self._last_look_s = float("-inf")
        self.newest: ForeignCheckpoint | None = None
        self.failed: set[str] = set()
        self._recall()

    def look(self, now_s: float, tree: TreeReading) -> bool:
        """True when a newer whole checkpoint has appeared since the last look."""
        if self._options.checkpoints is None or now_s - self._last_look_s < LOOK_EVERY_S:
            return False
        self._last_look_s = now_s
        found = self.choose_now(tree)
        is_new = found is not None and (self.newest is None or str(found.path) != str(self.newest.path))
        self.newest = found
        return is_new

    def choose_now(self, tree: TreeReading | None = None) -> ForeignCheckpoint | None:
        """The newest whole one that this run wrote and that was not tried in vain."""
        if self._options.checkpoints is None:
            return None
        ours = [
            checkpoint
            for checkpoint in list_checkpoints(self._options.checkpoints, self._cwd)
            if checkpoint.mtime_s >= self._since_s - 1.0
        ]
        return choose(ours, failed=self.failed, open_paths=_paths_open_in(tree))

    def newest_path(self, foreign: ForeignCheckpoint | None = None) -> str | None:
        """What an attempt would go on from: a stranger's own checkpoint, else the newest of an attached session."""
        found = foreign or self.newest
        if found is not None:
            return str(found.path)
        path = read_session(self._run).last_checkpoint.path
        if path is None or not Path(path).is_dir():
            return None
        from jackline.checkpoint.format.catalogue import list_names  # 20 ms that a stranger's command does not need

        # Somebody may have gone back since the session wrote its last words.
        live = [str(name) for name in list_names(Path(path).parent)]
        return path if Path(path).name in live or not live else str(Path(path).with_name(live[0]))

    def argv_from(self, argv: Sequence[str], checkpoint: ForeignCheckpoint | None) -> list[str]:
        if self._options.resume_arg is None:
            return list(argv)
        return resume_argv(list(argv), self._options.resume_arg, checkpoint)

    def describe(self, checkpoint: ForeignCheckpoint | None) -> str:
        if self._options.checkpoints is None and (own := self.newest_path()) is not None:
            return f"going on from {own}"
        if self._options.checkpoints is None:
            return "Jackline knows no checkpoints of this command, so it starts from its own beginning"
        if checkpoint is None:
            return f"no whole checkpoint matches {shlex.quote(self._options.checkpoints)}: from the beginning"
        if self._options.resume_arg is None:
            return f"newest whole checkpoint: {checkpoint.path} (no --resume-arg: the command must find it itself)"
        return f"going on from {checkpoint.path}"

    def _recall(self) -> None:
        """A checkpoint that an earlier attempt resumed from and died of without writing a newer one."""
        for attempt in self._run.list_attempts():
            ended = read_exit(attempt)
            if ended.resumed_from and ended.made_progress is False:
                self.failed.add(ended.resumed_from)


def _paths_open_in(tree: TreeReading | None) -> set[str]:
    if tree is None:
        return set()
    return {file.path for process in tree.processes for file in open_files(process.pid) if file.is_writing}

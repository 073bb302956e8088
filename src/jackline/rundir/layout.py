"""Where a run's files are. No other module contains their names."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from jackline.immutable import immutable

FORMAT = 1
MAX_ENTRIES = 100_000  # of one folder; a run never comes near it
MAX_RANKS = 4096
MAX_DIGITS = 9
_ATTEMPT, _SESSION, _INCIDENT = ("", ""), ("session-", ".json"), ("incident-", ".txt")  # around a number
_RANK = ("rank-", ".json")
_RESCUE = ("rescue-", ".json")
LIVE_VARIABLE = "JACKLINE_LIVE"  # set by the supervisor where viewers draw the signs of life
DISK_BUDGET_VARIABLE = "JACKLINE_DISK_BUDGET"  # bytes; from the supervisor to a session


@immutable
class RunDir:
    """One run's folder, `runs/NAME`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def has_run_file(self) -> bool:
        """False also for a path that cannot be checked: too long, or in a folder that we may not read."""
        try:
            return self.run_file.exists()
        except OSError:
            return False

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of a recipe's language model, so that the run is complete by itself."""
        return self.path / "tokenizer.json"

    @property
    def recipe_file(self) -> Path:
        """A copy of the file of a person's own recipe, as it was when the run was started."""
        return self.path / "recipe.py"

    @property
    def supervisor_file(self) -> Path:
        return self.path / "supervisor.json"

    @property
    def supervisor_events(self) -> Path:
        return self.path / "events-supervisor.jsonl"

    @property
    def timeline(self) -> Path:
        """What the run was doing, from its first second to its last."""
        return self.path / "timeline.jsonl"

    @property
    def stop_request(self) -> Path:
        return self.path / "stop-request.json"

    @property
    def validation_request(self) -> Path:
        """Created by `jackline validate`, removed by the trainer when it runs the validation."""
        return self.path / "validation-request"

    @property
    def mirror_file(self) -> Path:
        """Only with --mirror: what was uploaded, and when."""
        return self.path / "mirror.json"

    @property
    def mirror_lock(self) -> Path:
        """Held by the mirror process that writes mirror.json."""
        return self.path / "mirror.lock"

    @property
    def foreign_file(self) -> Path:
        """Only with --checkpoints: what is known about the command's own checkpoints."""
        return self.path / "foreign.json"

    @property
    def kept(self) -> Path:
        """Only with --checkpoints: copies of the command's own checkpoints, made before a restart."""
        return self.path / "kept"

    @property
    def supervisor_log(self) -> Path:
        """Errors of the supervisor itself; empty if there were none."""
        return self.path / "supervisor.log"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def out_log(self) -> Path:
        return self.path / "out.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def job_file(self) -> Path:
        """Only in a job of several machines: which folder has its checkpoints."""
        return self.path / "job.json"

    @property
    def skipped_file(self) -> Path:
        """Only after `resume --skip-batches`: batches that are left out."""
        return self.path / "skipped-batches.json"

    @property
    def rescued(self) -> Path:
        """Checkpoints that Jackline took of a script which had not asked for any."""
        return self.path / "rescue"

    @property
    def memory_file(self) -> Path:
        """The memory that the rehearsal measured, and the memory that was predicted."""
        return self.path / "memory.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def session_file(self, rank: int = 0) -> Path:
        return self.path / f"session-{rank}.json"

    def session_events(self, rank: int = 0) -> Path:
        return self.path / f"events-{rank}.jsonl"

    def metrics(self, rank: int = 0) -> Path:
        return self.path / f"metrics-{rank}.jsonl"

    @property
    def printed_metrics(self) -> Path:
        """Numbers that the supervisor recognised in the command's output."""
        return self.path / "metrics-printed.jsonl"

    def seen(self, rank: int = 0) -> Path:
        return self.path / f"seen-{rank}.bin"

    def session_files(self) -> list[Path]:
        return _numbered(self.path, _SESSION)[:MAX_RANKS]

    @property
    def was_attached(self) -> bool:
        """A session's events are there from its first moment; its state may not be, when a script crashes soon."""
        return bool(self.session_files()) or self.session_events().exists()

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:03d}")

    def list_attempts(self) -> list[AttemptDir]:
        """All attempts, oldest first. A link, or a folder with a name that we would not give, is ignored."""
        found = (path for path in _numbered(self.attempts, _ATTEMPT) if path.name == f"{int(path.name):03d}")
        return [AttemptDir(path) for path in found if path.is_dir() and not path.is_symlink()]

    def last_attempt(self) -> AttemptDir | None:
        attempts = self.list_attempts()
        return attempts[-1] if attempts else None


@immutable
class AttemptDir:
    """One start of the command, `attempts/NNN`."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def raw_out(self) -> Path:
        return self.path / "raw.out"

    @property
    def raw_err(self) -> Path:
        """Only with --split-streams."""
        return self.path / "raw.err"

    @property
    def start_file(self) -> Path:
        """Written by the keeper: which process the child is."""
        return self.path / "start.json"

    @property
    def wait_file(self) -> Path:
        """Written by the keeper: how the child ended, as the kernel reported it."""
        return self.path / "wait.json"

    @property
    def keyboard(self) -> Path:
        """A FIFO with what viewers type; only with --tty."""
        return self.path / "keyboard"

    @property
    def reserve(self) -> Path:
        """Disk space reserved for the command's own output; freed when the disk is nearly full."""
        return self.path / "reserve"

    @property
    def exit_file(self) -> Path:
        return self.path / "exit.json"

    @property
    def findings_file(self) -> Path:
        return self.path / "findings.json"

    @property
    def surroundings_file(self) -> Path:
        """The code and the packages it ran with."""
        return self.path / "surroundings.json"

    @property
    def code_diff(self) -> Path:
        """Changes that were not committed when it started."""
        return self.path / "code.diff"

    @property
    def intent_file(self) -> Path:
        return self.path / "intent.json"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    @property
    def ranks(self) -> Path:
        """Of a distributed job: which process each rank is, and the output of ranks that are not on the screen."""
        return self.path / "ranks"

    def rank_out(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank}.out"

    def rank_notes(self) -> list[Path]:
        return _numbered(self.ranks, _RANK)[:MAX_RANKS]

    @property
    def case_file(self) -> Path:
        """The samples of the newest verdict that was no progress, to be replayed."""
        return self.path / "case.json"

    def rescue_file(self, pid: int) -> Path:
        """Written by a process of the command: its newest rescue."""
        return self.path / f"rescue-{pid}.json"

    def kept_rescue_file(self, pid: int) -> Path:
        """The last rescue that was saved, where the newest was not."""
        return self.path / f"rescue-{pid}.saved.json"

    def list_rescues(self) -> list[Path]:
        return _numbered(self.path, _RESCUE)

    def rescue_door(self, pid: int) -> Path:
        """A FIFO through which a process is asked to rescue its state; made after its first optimizer step."""
        return self.stacks / f"ask.{pid}"

    def incident(self, number: int) -> Path:
        return self.path / f"incident-{number}.txt"

    def list_incidents(self) -> list[Path]:
        return _numbered(self.path, _INCIDENT)


def _numbered(folder: Path, around: tuple[str, str]) -> list[Path]:
    """The entries named by a number between these two texts, in its order. Empty when the folder cannot be read."""
    found: list[tuple[int, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in itertools.islice(entries, MAX_ENTRIES):
                name = entry.name
                digits = name[len(around[0]) : len(name) - len(around[1])]
                is_ours = name == f"{around[0]}{digits}{around[1]}" and digits.isascii() and digits.isdigit()
                if is_ours and len(digits) <= MAX_DIGITS:
                    found.append((int(digits), name))
    except OSError:
        return []
    return [folder / name for _, name in sorted(found)]

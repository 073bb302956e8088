"""Errors meant for people: what happened, what it means, one next action.

Owns the exit codes and the format of an error. The code that raises one supplies the values; only the command line
prints it.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANNOT_RESUME = 3
EXIT_STOPPED = 75


class JacklineError(Exception):
    """An error with everything a person needs; `str()` is the complete text as printed."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, detail: tuple[str, ...] | str = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = tuple(detail.splitlines()) if isinstance(detail, str) else tuple(detail)
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"error: {self.message}"]
        lines += [f"       {line}" for line in self.detail]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class UsageError(JacklineError):
    """The user asked for something that is not possible or makes no sense."""

    exit_code = EXIT_USAGE


class CannotResume(JacklineError):
    """There is no complete checkpoint to resume from."""

    exit_code = EXIT_CANNOT_RESUME

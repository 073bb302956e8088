"""`python -m jackline.data`: the builder process (`build FOLDER SETTINGS`) and the part of `jackline data` that
imports numpy."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from jackline.errors import JacklineError
from jackline.extras import explained
from jackline.machine.priority import step_back
from jackline.pipes import drop_output


def main() -> int:
    name, rest = sys.argv[1], sys.argv[2:]
    try:
        if name == "build":
            build_in_background(Path(rest[0]), json.loads(rest[1]))
        else:
            from jackline.data.command_line import run_request

            with explained(f"`jackline data {name}`"):
                run_request(name, json.loads(sys.stdin.read() if rest == ["-"] else rest[0]))
            sys.stdout.flush()
    except JacklineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        drop_output()
        return 0
    except KeyboardInterrupt:
        print("stopped; what was tokenised is kept, the same command resumes from there", file=sys.stderr)
        return 130
    return 0


def build_in_background(folder: Path, settings: dict[str, object]) -> None:
    from jackline.data.build.builder import run_builder
    from jackline.data.progress import silent
    from jackline.data.spec import CacheSettings

    parent = os.getppid()
    # Ctrl-C goes to the whole process group, Slurm's warning to all of a job. It ends when its reader ends.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    step_back(5)
    run_builder(
        folder,
        CacheSettings.from_json(settings),
        silent,
        for_readers=True,
        should_stop=lambda: os.getppid() != parent,
    )


if __name__ == "__main__":
    sys.exit(main())

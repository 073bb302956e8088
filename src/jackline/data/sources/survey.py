"""How much there is to read, found out beside the work.

Owns a thread that adds up the sizes of all files, so that a percentage and a time to go appear without delaying the
first document. Says nothing while it does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jackline.data.sources.listing import list_files
from jackline.data.spec import DataSpec
from jackline.errors import JacklineError


def start_survey(spec: DataSpec, on_total: Callable[[int], None]) -> threading.Thread:
    """Calls `on_total` once with the bytes of all sources; never when one of them does not tell sizes."""

    def add_up() -> None:
        total = 0
        try:
            for source in spec.sources:
                for found in list_files(source.url, needs_known_ending=source.format == "auto"):
                    if found.size is None:
                        return
                    total += found.size
        except JacklineError:
            return  # the reading itself will meet the same trouble and say so
        on_total(total)

    thread = threading.Thread(target=add_up, name="jackline-survey", daemon=True)
    thread.start()
    return thread

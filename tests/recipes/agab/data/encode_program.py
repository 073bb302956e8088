"""Prepares a table in a process of its own, with small shards so that a death has many places to strike.

python -m tests.recipes.agab.data.encode_program TABLE CACHE [READY_FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from jackline.errors import JacklineError
from jackline.recipes.agab.data import features
from jackline.recipes.agab.data.prepared import AffinitySettings, prepare_affinity

SHARD_ROWS = 100


def main() -> None:
    features.SHARD_ROWS = SHARD_ROWS
    try:
        data = prepare_affinity(AffinitySettings(sys.argv[1], cache_dir=Path(sys.argv[2])), print)
    except JacklineError as error:
        print(error)
        sys.exit(error.exit_code)
    print(f"fingerprint {data.fingerprint}")


if __name__ == "__main__":
    main()

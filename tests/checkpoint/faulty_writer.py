"""The real writer process on a disk with a fault: FAULT in the environment says which."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jackline.checkpoint.writer.serve import main
from tests.checkpoint.faults import Fault, FaultyDisk

if __name__ == "__main__":
    main(disk=FaultyDisk(Fault(**json.loads(os.environ["FAULT"]))))

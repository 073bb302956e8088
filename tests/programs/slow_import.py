"""Eight silent seconds before the first line, all of them in an import."""
# expect: exit=0 cause=finished never=STUCK,SUSPECT says="importing heavy_package"

import pathlib
import sys

pathlib.Path("heavy_package.py").write_text(
    "import time\nend = time.monotonic() + 6\nwhile time.monotonic() < end: sum(range(20_000))\n"
)
sys.path.insert(0, ".")
import heavy_package  # HERE

print("imported")

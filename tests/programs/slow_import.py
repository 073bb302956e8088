"""Six silent seconds before the first line, all of them in an import of a package."""
# expect: exit=0 cause=finished never=STUCK,SUSPECT says="importing heavy_package"

import pathlib
import sys

folder = pathlib.Path("lib/python3/site-packages/heavy_package")
folder.mkdir(parents=True)
(folder / "__init__.py").write_text(
    "import time\nend = time.monotonic() + 6\nwhile time.monotonic() < end: sum(range(20_000))\n"
)
sys.path.insert(0, str(folder.parent))
import heavy_package  # HERE

print("imported")

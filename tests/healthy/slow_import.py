"""Fifteen seconds of import, as with a cold disk and a large package."""

# expect: slow=yes
import pathlib
import sys

pathlib.Path("enormous.py").write_text(
    "import time\n"
    "end = time.monotonic() + 15\n"
    "while time.monotonic() < end:\n"
    "    exec(compile('x = [i * i for i in range(100)]\\n' * 50, 'generated', 'exec'))\n"
)
sys.path.insert(0, ".")
import enormous

print("imported", enormous.__name__)

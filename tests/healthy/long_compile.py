"""A compiler works for a long time in a child of a child; the script waits without a word."""

# expect: slow=yes
import subprocess
import sys

compiler = "import time\nend = time.monotonic() + 15\nwhile time.monotonic() < end: sum(range(50_000))"
print("compiling kernels")
subprocess.run(["sh", "-c", '"$0" -c "$1"; true', sys.executable, compiler], check=True)
print("compiled")

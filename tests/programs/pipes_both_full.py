"""Parent writes megabytes to a child that writes megabytes back; neither reads."""

# expect: slow=yes verdict=STUCK marker=HERE
import subprocess, sys

code = (
    "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(line * 3)\n    sys.stdout.buffer.flush()"
)
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for i in range(100000):
    child.stdin.write(b"x" * 99 + b"\n")  # HERE

"""The child that it writes to ends with an error of its own."""
# expect: cause=own_exception exit=1 marker=HERE says="had ended with exit code 4" slow=yes

import subprocess
import sys

READS_TWO = "import sys; sys.stdin.readline(); print('sink: schema mismatch', flush=True); sys.exit(4)"
sink = subprocess.Popen([sys.executable, "-c", READS_TWO], stdin=subprocess.PIPE, text=True)
assert sink.stdin is not None
while True:
    sink.stdin.write("x" * 4096 + "\n")  # HERE

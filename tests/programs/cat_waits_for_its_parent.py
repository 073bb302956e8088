"""A child program waits for its input to end, the parent for the child: the pipe was never closed."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE

import subprocess

child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
child.stdin.write(b"batch")
child.stdin.flush()
print("waiting for the tokenizer")
child.wait()  # HERE

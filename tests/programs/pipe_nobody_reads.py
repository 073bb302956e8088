"""The classic: a child fills its pipe while the parent waits for its end instead of reading."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE

import subprocess
import sys

child = subprocess.Popen([sys.executable, "-c", "print('x' * 10_000_000)"], stdout=subprocess.PIPE)
print("evaluating")
child.wait()  # HERE

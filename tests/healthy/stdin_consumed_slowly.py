"""Reads its work from a pipe, a line every second and a half."""
# expect: stdin=lines:10 out="handled 10"

import sys
import time

count = 0
for line in sys.stdin:
    time.sleep(1.5)
    count += 1
print("handled", count)

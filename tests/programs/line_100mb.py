"""One line of 100 MB, then an ordinary one."""
# expect: exit=0 cause=finished out="after the long line" never=STUCK,SUSPECT

import os

block = b"x" * (1 << 20)
for _ in range(100):
    os.write(1, block)
os.write(1, b"\nafter the long line\n")

"""Prints more than the disk of the runs folder holds, then finishes its work: a print must not end a training."""
# expect: exit=0 cause=finished runs_on=tmpfs:16M work=done-30000 off=log

import pathlib
import time

line = "loss 0.6931 " * 100
for step in range(30_000):
    print(step, line)
    if step % 100 == 0:
        time.sleep(0.015)  # 8 MB a second: more than any training prints
pathlib.Path("done-30000").write_text("the work was finished")

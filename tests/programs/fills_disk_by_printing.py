"""Prints more than the disk of the runs folder holds, then finishes its work: a print must not end a training."""
# expect: exit=0 cause=finished runs_on=tmpfs:16M work=done-30000

import pathlib

line = "loss 0.6931 " * 100
for step in range(30_000):
    print(step, line)
pathlib.Path("done-30000").write_text("the work was finished")

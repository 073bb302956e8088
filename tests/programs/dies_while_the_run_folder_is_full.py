"""The disk of the run's folder is full, so the log lacks the traceback; it is still in the raw output."""
# expect: cause=own_exception exit=1 marker=HERE runs_on=tmpfs:24M says="too many classes" off=log,output,stacks

import os

with open(os.path.join(os.environ["JACKLINE_RUN_DIR"], "filler"), "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(b"x" * 65536)
    except OSError:
        pass


def check(classes: int) -> None:
    raise ValueError(f"too many classes: {classes}")  # HERE


check(1001)

"""The whole evaluation is one call into C that lasts longer than every threshold and never lets the GIL go."""

import collections
import itertools
import time


def evaluate(seconds: float) -> None:
    # Every part of this line is C: no Python frame and no thread switch until the time is over.
    collections.deque(itertools.takewhile((time.monotonic() + seconds).__gt__, iter(time.monotonic, None)), maxlen=0)


print("evaluating", flush=True)
evaluate(11)
print("evaluated")

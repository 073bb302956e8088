"""One sort of a large array inside numpy, over and over, nothing printed."""

# expect: slow=yes needs=numpy
import time

import numpy as np

values = np.random.default_rng(0).random(8_000_000)
end = time.monotonic() + 13
while time.monotonic() < end:
    ordered = np.sort(values)
print("sorted", len(ordered))

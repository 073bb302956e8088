"""Three silent seconds, then a thousand lines at once, again and again."""

import time

for step in range(5):
    time.sleep(2.8)
    for line in range(1000):
        print("step", step, "layer", line, "grad 0.01")

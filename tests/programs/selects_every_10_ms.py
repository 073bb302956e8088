"""select() with a 10 ms timeout around nothing."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import select, os

r, w = os.pipe()
while True:
    if select.select([r], [], [], 0.01)[0]:  # HERE
        break

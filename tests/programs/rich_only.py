"""Nothing but a rich bar, which draws nothing at all off a terminal."""
# expect: exit=0 cause=finished never=STUCK,SUSPECT out="done"

import time

from rich.progress import track

for _ in track(range(60), description="train"):
    time.sleep(0.05)
print("done")

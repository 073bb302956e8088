"""Nothing but a tqdm bar: one endless line that is redrawn with carriage returns."""
# expect: exit=0 cause=finished never=STUCK,SUSPECT out="60/60"

import time

from tqdm import tqdm

for _ in tqdm(range(60), desc="train"):
    time.sleep(0.05)

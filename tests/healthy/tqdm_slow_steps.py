"""A bar that moves every three seconds, because a step takes as long."""

import time

from tqdm import tqdm

for _ in tqdm(range(5), desc="epoch"):
    time.sleep(2.8)

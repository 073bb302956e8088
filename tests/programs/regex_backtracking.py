"""Catastrophic backtracking: one line, a whole core, for ever. From outside it cannot be told from work."""
# expect: verdict=BUSY never=STUCK,SUSPECT marker=HERE watch_s=15 slow=yes

import re


def clean(text: str) -> bool:
    return re.match(r"(a+)+$", text) is not None  # HERE


print("cleaning the corpus")
clean("a" * 60 + "b")

"""Waits for a flag by spinning: a whole core, no progress, and no way to tell it from work outside."""
# expect: verdict=BUSY|PROGRESS never=STUCK,SUSPECT marker=HERE

is_ready = False


def wait() -> None:
    while not is_ready:  # HERE
        pass


print("waiting for the other thread")
wait()

"""A plain lock taken again by the thread that holds it."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE

import threading

lock = threading.Lock()


def save() -> None:
    with lock:  # HERE
        print("saved")


def step() -> None:
    with lock:
        save()


step()

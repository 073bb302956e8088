"""Two threads take two locks in opposite order."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE also=THERE

import threading

weights, statistics = threading.Lock(), threading.Lock()
both_hold_one = threading.Barrier(2)


def update_statistics() -> None:
    with statistics:
        both_hold_one.wait()
        with weights:  # THERE
            pass


def update_weights() -> None:
    with weights:
        both_hold_one.wait()
        with statistics:  # HERE
            pass


print("updating")
threading.Thread(target=update_statistics, name="statistics").start()
update_weights()

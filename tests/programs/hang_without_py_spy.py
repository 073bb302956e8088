"""A hang where no process may look into another: only the dump that it writes itself can name the line."""
# expect: verdict=STUCK "label=DEADLOCK|STUCK_LOCK" marker=HERE also=THERE without=py-spy says=faulthandler

import multiprocessing
import threading


def prepare(connection) -> None:
    threading.Event().wait()  # THERE


def wait_for_the_other_rank() -> None:
    threading.Event().wait()  # HERE


if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=prepare, args=(None,), daemon=True).start()
    print("waiting")
    wait_for_the_other_rank()

"""A worker sleeps for ever; the line to name is the worker's, not only the main process's."""
# expect: verdict=STUCK label=STUCK_CHILD marker=HERE also=THERE

import multiprocessing
import threading


def prepare(connection) -> None:
    threading.Event().wait()  # THERE
    connection.send("batch")


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=prepare, args=(theirs,), daemon=True).start()
    print("waiting for the worker")
    ours.recv()  # HERE

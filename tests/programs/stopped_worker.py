"""A worker was stopped (SIGSTOP, a forgotten Ctrl-Z, a debugger); the main process waits for its result."""
# expect: verdict=PAUSED label=STOPPED_CHILD marker=HERE "says=paused (SIGSTOP)"

import multiprocessing
import os
import signal


def prepare(connection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    connection.send("batch")


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=prepare, args=(theirs,), daemon=True).start()
    print("waiting for the worker")
    ours.recv()  # HERE

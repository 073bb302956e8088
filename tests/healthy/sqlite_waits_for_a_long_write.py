"""Waits, trying again and again, for a database that another process writes to in one long transaction."""
# expect: slow=yes

import multiprocessing
import sqlite3
import time


def write(has_begun):
    connection = sqlite3.connect("runs.db", isolation_level=None)
    connection.execute("create table steps(number)")
    connection.execute("begin immediate")
    has_begun.set()
    end_s = time.monotonic() + 25
    while time.monotonic() < end_s:
        connection.execute("insert into steps values (1)")
        time.sleep(0.01)
    connection.execute("commit")


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    has_begun = context.Event()
    writer = context.Process(target=write, args=(has_begun,))
    writer.start()
    has_begun.wait()
    connection = sqlite3.connect("runs.db", timeout=60)
    connection.execute("insert into steps values (2)")
    connection.commit()
    writer.join()

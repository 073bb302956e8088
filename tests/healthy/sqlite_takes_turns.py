"""Two processes take turns with a database that each of them locks for 1.5 s."""
# expect: slow=yes

import subprocess
import sys

WRITES = """
import sqlite3, time
db = sqlite3.connect("x.db", timeout=60, isolation_level=None)
db.execute("create table if not exists t(a)")
for _ in range(4):
    db.execute("begin immediate")
    db.execute("insert into t values (1)")
    time.sleep(1.5)
    db.execute("commit")
    time.sleep(0.05)
"""
writers = [subprocess.Popen([sys.executable, "-c", WRITES]) for _ in range(2)]
for writer in writers:
    writer.wait()

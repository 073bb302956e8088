"""Another process holds the write lock of a database; sqlite sleeps and tries again, for an hour."""
# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE

import sqlite3
import subprocess
import sys

HOLDS = """
import sqlite3, time
db = sqlite3.connect("runs.db", isolation_level=None)
db.execute("create table if not exists losses(value)")
db.execute("begin exclusive")
print("held", flush=True)
time.sleep(3600)
"""
holder = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE)
holder.stdout.readline()
db = sqlite3.connect("runs.db", timeout=3600)
db.execute("insert into losses values (0.5)")  # HERE

"""Small transactions with a sync each, silently."""

import sqlite3
import time

database = sqlite3.connect("results.db")
database.execute("create table results (step integer, loss real)")
end = time.monotonic() + 13
step = 0
while time.monotonic() < end:
    database.execute("insert into results values (?, ?)", (step, 1 / (step + 1)))
    database.commit()
    step += 1
    time.sleep(0.4)
print("wrote", step, "rows")

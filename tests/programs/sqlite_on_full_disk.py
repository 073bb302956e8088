"""A data base that grows until its disk is full; SQLite has words of its own for that."""
# expect: cause=disk_full exit=1 marker=HERE cwd_on=tmpfs:4M

import sqlite3

table = sqlite3.connect("examples.db")
table.execute("create table examples (text)")
while True:
    with table:  # HERE
        table.execute("insert into examples values (?)", ("x" * 100_000,))

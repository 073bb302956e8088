"""Two connections of one process; the first has an open transaction."""
# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE says="a database that another connection has locked"

import sqlite3, tempfile, os

path = os.path.join(tempfile.mkdtemp(), "d.db")
one = sqlite3.connect(path)
one.execute("create table t (x)")
one.commit()
one.execute("insert into t values (1)")
two = sqlite3.connect(path, timeout=10_000)
print("writing")
two.execute("insert into t values (2)")  # HERE

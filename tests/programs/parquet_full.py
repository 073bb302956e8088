"""pyarrow fills the disk. The line of the person is named, not the Cython file of the library."""
# expect: slow=yes cause=disk_full exit=1 cwd_on=tmpfs:3M marker=HERE

import os

import pyarrow as pa
import pyarrow.parquet as pq

rows = pa.table({"text": [os.urandom(1000) for _ in range(20_000)]})
pq.write_table(rows, "part-0.parquet")  # HERE

"""An array does not fit on the disk that the script writes to; numpy says only how much was written."""
# expect: cause=disk_full exit=1 marker=HERE cwd_on=tmpfs:4M needs=numpy

import numpy as np


class Cache:
    def __init__(self) -> None:
        self.rows = np.zeros((1 << 20, 8))

    def flush(self) -> None:
        with open("rows.npy", "wb") as file:
            self.rows.tofile(file)  # HERE


Cache().flush()

"""Opens a FIFO that nobody will write to."""
# expect: verdict=STUCK marker=HERE

import os

os.mkfifo("batches")
print("opening")
open("batches")  # HERE

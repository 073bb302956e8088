"""The error is written to a log file; the output ends as if nothing had happened."""
# expect: cause=own_exception exit=1 says="bad learning rate"

import logging
import sys
import time

logging.basicConfig(filename="train.log", level=logging.INFO)
print("training")
try:
    time.sleep(1.5)
    raise ValueError("bad learning rate: -1")
except ValueError:
    logging.exception("training failed")
    sys.exit(1)

"""Prints nothing at all; its own log file has a line a second and a half."""

import logging
import time

logging.basicConfig(filename="train.log", level=logging.INFO)
for step in range(10):
    time.sleep(1.5)
    logging.info("step %d loss %.4f", step, 1 / (step + 1))

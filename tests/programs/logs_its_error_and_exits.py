"""Logs the error in its own words and exits 1."""

# expect: slow=yes cause=own_exception|exit_code exit=1 says="validation set is empty"
import logging, sys

logging.basicConfig(level=logging.INFO)
logging.info("starting")
logging.error("validation set is empty")
sys.exit(1)

"""Ends with a code of its own and no word."""
# expect: cause=exit_code exit=3

import sys

print("validation failed")
sys.exit(3)

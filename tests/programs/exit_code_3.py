"""Ends with a code of its own and no word."""
# expect: cause=exit_code exit=3 marker=HERE says="by sys.exit at exit_code_3.py"

import sys

print("validation failed")
sys.exit(3)  # HERE

"""Ends with words instead of a number."""
# expect: cause=exit_code|own_exception exit=1 says="no GPU was found"

import sys

sys.exit("no GPU was found, this script needs one")

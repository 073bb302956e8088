"""The last words have no newline."""
# expect: exit=0 cause=finished out="the last words"

import sys

print("first line")
sys.stdout.write("the last words")

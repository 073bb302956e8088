"""sys.stdin.read() of a silent pipe."""

# expect: slow=yes verdict=STUCK|SUSPECT label=KEYBOARD marker=HERE stdin=silent
import sys

text = sys.stdin.read()  # HERE

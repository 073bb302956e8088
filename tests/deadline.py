"""How long a test waits for a state before it says what it waited for in vain.

Not a guess at how fast a machine is: only a hang meets it. It is shorter than pytest's own limit of 300 s, which ends
a test without telling what was missing.
"""

HANGS_S = 240.0

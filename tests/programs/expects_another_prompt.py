"""Drives a program in a terminal of its own and waits for another prompt than the one that it prints, as pexpect does."""
# expect: verdict=STUCK label=STUCK_CHILD marker=HERE says="they wait for each other"

import os
import pty
import subprocess

mine, theirs = pty.openpty()
ask = "printf 'Are you sure (yes/no)? '; read answer; echo copied"
copying = subprocess.Popen(["sh", "-c", ask], stdin=theirs, stdout=theirs, stderr=theirs)
os.close(theirs)
print("copying to the node")
seen = b""
while b"password:" not in seen:
    seen += os.read(mine, 1000)  # HERE
os.write(mine, b"secret\n")
copying.wait()

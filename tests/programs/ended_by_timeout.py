"""The command `timeout` ends it; its exit code is 124, and nothing is printed."""
# expect: cause=timed_out exit=124 says="its time limit was over" command="timeout 2 {python} {program}"

import time

print("training")
time.sleep(3600)

"""An exit code of 256 - 9."""

# expect: cause=killed_by_someone|kernel_oom|exit_code|unknown|worker_killed exit=247 says=9
import os, subprocess, sys

c = subprocess.Popen(["sh", "-c", "kill -9 $$"])
sys.exit(c.wait() % 256)

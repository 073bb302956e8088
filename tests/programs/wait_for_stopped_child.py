"""waits for a child that stopped itself."""

# expect: slow=yes verdict=PAUSED says="kill -CONT"
import subprocess

subprocess.run(["sh", "-c", "kill -STOP $$; echo never"])  # HERE

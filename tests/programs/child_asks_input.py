"""A child process asks for a password on stdin."""

# expect: slow=yes verdict=STUCK|SUSPECT label=KEYBOARD stdin=silent
import subprocess, sys

subprocess.run([sys.executable, "-c", "input('password: ')"])  # HERE

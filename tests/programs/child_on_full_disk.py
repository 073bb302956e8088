"""A command of the script fails because of the disk; the script itself says only that it failed."""

# expect: slow=yes cause=disk_full exit=1 cwd_on=tmpfs:2M marker=HERE
import subprocess

subprocess.run("head -c 9000000 /dev/zero > out.bin", shell=True, check=True)  # HERE

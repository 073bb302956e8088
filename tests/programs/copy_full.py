"""shutil.copy to a full disk: the error names both files, and the second one is where there is no room."""

# expect: slow=yes cause=disk_full exit=1 cwd_on=tmpfs:2M marker=HERE says="could not write copy.bin"
import shutil, sys

shutil.copy(sys.executable, "copy.bin")  # HERE

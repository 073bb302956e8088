"""shutil.copy to a full disk: the error names both files, and the second one is where there is no room."""

# expect: slow=yes cause=disk_full exit=1 cwd_on=tmpfs:2M marker=HERE says="could not write copy.bin"
import os, shutil

big = os.path.join(os.path.dirname(os.environ["JACKLINE_RUN_DIR"]), "big.bin")
with open(big, "wb") as file:
    file.write(bytes(8 << 20))
shutil.copy(big, "copy.bin")  # HERE

"""zipfile stores too much."""

# expect: slow=yes cause=disk_full exit=1 cwd_on=tmpfs:2M
import zipfile, os

with zipfile.ZipFile("a.zip", "w") as z:
    z.writestr("x", os.urandom(6 << 20))

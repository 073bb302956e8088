"""One C call of many seconds that releases the GIL."""

# expect: slow=yes
import hashlib

hashlib.pbkdf2_hmac("sha256", b"x", b"salt", 12_000_000)
print("derived")

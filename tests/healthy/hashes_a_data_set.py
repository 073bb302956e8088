"""Reads a file from disk and hashes it, silently: the only sign is read bytes and CPU."""

import hashlib
import os
import time

with open("shard.bin", "wb") as file:
    for _ in range(64):
        file.write(os.urandom(1 << 20))
end = time.monotonic() + 13
while time.monotonic() < end:
    with open("shard.bin", "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    time.sleep(0.2)
print(digest.hexdigest())

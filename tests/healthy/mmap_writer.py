"""Writes through an mmap, little at a time."""

# expect: slow=yes
import mmap, time

f = open("m.bin", "w+b")
f.truncate(1 << 20)
m = mmap.mmap(f.fileno(), 1 << 20)
for i in range(28):
    m[i * 4096 : i * 4096 + 4] = b"abcd"
    time.sleep(0.5)

"""Latin-1 and torn UTF-8 among the lines."""
# expect: exit=0 cause=finished out="epoch 2"

import os

os.write(1, "époque 1".encode("latin-1") + b"\n")
os.write(1, "straße".encode()[:-3] + b"\n\xff\xfe\n")
os.write(1, b"epoch 2\n")

"""Parent reads a pipe until a double-forked grandchild is done."""

# expect: slow=yes
import os, time

r, w = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(r)
        for i in range(14):
            time.sleep(1)
            os.write(w, b".")
    os._exit(0)
os.close(w)
os.wait()
while os.read(r, 100):
    pass

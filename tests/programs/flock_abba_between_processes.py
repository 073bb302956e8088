"""Two processes take two lock files in opposite order."""

# expect: slow=yes verdict=STUCK marker=HERE
import fcntl, os, time


def take(name):
    f = open(name, "w")
    fcntl.flock(f, fcntl.LOCK_EX)  # HERE
    return f


r1, w1 = os.pipe()
r2, w2 = os.pipe()
if os.fork() == 0:
    b = take("b.lock")
    os.write(w1, b"x")
    os.read(r2, 1)
    a = take("a.lock")
    os._exit(0)
a = take("a.lock")
os.write(w2, b"x")
os.read(r1, 1)
b = take("b.lock")

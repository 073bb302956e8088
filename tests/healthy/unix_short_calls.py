"""Threads make short calls over a unix socket to a server thread in a child."""

# expect: slow=yes
import os, socket, time, threading
from concurrent.futures import ThreadPoolExecutor

s = socket.socket(socket.AF_UNIX)
s.bind("api")
s.listen(50)
pid = os.fork()
if pid == 0:
    while True:
        c, _ = s.accept()
        m = c.recv(100)
        if m == b"end":
            os._exit(0)
        time.sleep(0.2)
        c.sendall(b"ok")
        c.close()


def call(m):
    with socket.socket(socket.AF_UNIX) as c:
        c.connect("api")
        c.sendall(m)
        return c.recv(10)


with ThreadPoolExecutor(4) as pool:
    print(len(list(pool.map(call, [b"q"] * 65))))
call(b"end")

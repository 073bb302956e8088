"""Main waits for a future; its thread waits for a silent server."""

# expect: slow=yes verdict=STUCK says=network
import os, socket
from concurrent.futures import ThreadPoolExecutor

srv = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    c, _ = srv.accept()
    c.recv(1 << 20)
    c.recv(1)
    os._exit(0)


def fetch():
    s = socket.create_connection(srv.getsockname())
    s.sendall(b"hello")
    return s.recv(100)  # HERE


with ThreadPoolExecutor(2) as pool:
    print(pool.submit(fetch).result())

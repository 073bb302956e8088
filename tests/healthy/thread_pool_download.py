"""Four threads download from a server that trickles; the main thread waits in map()."""

import os
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

server = socket.create_server(("127.0.0.1", 0), backlog=16)
port = server.getsockname()[1]


def trickle(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 48000\r\n\r\n")
    for _ in range(48):
        connection.sendall(b"x" * 1000)
        time.sleep(0.3)
    connection.close()


def serve() -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(trickle, server.accept()[0])


def download(number: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/shard-{number}") as answer:
        return len(answer.read())


if os.fork() == 0:
    serve()
    os._exit(0)
server.close()
with ThreadPoolExecutor(4) as pool:
    print("downloaded", sum(pool.map(download, range(4))), "bytes")

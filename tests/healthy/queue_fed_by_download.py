"""The main thread waits on a queue while a thread downloads the next item slowly."""

import os
import queue
import socket
import threading
import time

server = socket.create_server(("127.0.0.1", 0))
address = server.getsockname()
if os.fork() == 0:
    connection, _ = server.accept()
    for _ in range(75):
        connection.sendall(b"x" * 800)
        time.sleep(0.2)
    os._exit(0)
server.close()
items: queue.Queue = queue.Queue()


def fetch() -> None:
    connection = socket.create_connection(address)
    received = bytearray()
    while block := connection.recv(4096):
        received += block
    items.put(bytes(received))


threading.Thread(target=fetch, daemon=True).start()
print("received", len(items.get()), "bytes")

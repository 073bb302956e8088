"""A pool of threads asks a server every two seconds, each time over a new connection, for a few bytes."""

import concurrent.futures
import socket
import threading
import time

server = socket.create_server(("127.0.0.1", 0))


def serve() -> None:
    while True:
        connection, _ = server.accept()
        connection.recv(100)
        connection.sendall(b"ok")
        connection.close()


def ask(number: int) -> bytes:
    time.sleep(2)
    with socket.create_connection(server.getsockname()) as connection:
        connection.sendall(b"%d" % number)
        return connection.recv(100)


threading.Thread(target=serve, daemon=True).start()
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    answers = list(pool.map(ask, range(20)))
print(len(answers), "answers")

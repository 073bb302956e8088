"""A file on the network stops in the middle: the main thread waits for a lock, the loop of fsspec for a socket."""
# expect: verdict=STUCK label=STUCK_NET marker=HERE says='waiting for the network (127.0.0.1:'

import socket
import threading

import fsspec

server = socket.create_server(("127.0.0.1", 0))
kept = []


def serve() -> None:
    while True:
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nthe first bytes")
        kept.append(connection)


threading.Thread(target=serve, daemon=True).start()
with fsspec.open(f"http://127.0.0.1:{server.getsockname()[1]}/corpus.txt") as file:
    file.read()  # HERE

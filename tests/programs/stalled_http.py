"""A download whose server sends a third of the body and then nothing."""
# expect: verdict=STUCK label=STUCK_NET marker=HERE

import os
import socket
import urllib.request

server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
if os.fork() == 0:
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 100_000)
    connection.recv(1)  # until the client goes
    os._exit(0)


def download() -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/corpus.txt") as answer:
        return answer.read()  # HERE


print("downloading the corpus")
download()

"""A peer that accepted the connection and never answers."""
# expect: verdict=STUCK label=STUCK_NET marker=HERE

import socket

server = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(server.getsockname())


def receive_gradients() -> bytes:
    return connection.recv(4096)  # HERE


print("waiting for the other rank")
receive_gradients()

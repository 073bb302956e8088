"""Waits for a worker that never connects."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import socket

s = socket.create_server(("127.0.0.1", 0))
s.accept()  # HERE

"""Connection refused."""

# expect: slow=yes cause=network exit=1
import socket

s = socket.socket()
s.bind(("127.0.0.1", 0))
p = s.getsockname()
s.close()
socket.create_connection(p)

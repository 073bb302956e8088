"""UDP messages to itself each second."""

# expect: slow=yes
import socket, time

a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
a.bind(("127.0.0.1", 0))
for i in range(14):
    a.sendto(b"ping", a.getsockname())
    a.recv(10)
    time.sleep(1)

"""connect() to a Unix socket whose server accepts nobody."""
# expect: slow=yes verdict=STUCK marker=HERE

import socket, tempfile, os

path = os.path.join(tempfile.mkdtemp(), "s")
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(1)
clients = []
for n in range(10):
    c = socket.socket(socket.AF_UNIX)
    c.connect(path)  # HERE
    clients.append(c)
    print("connected", n)

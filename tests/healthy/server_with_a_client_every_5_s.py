"""A server without time limits; a client comes every 5 s."""
# expect: slow=yes

import selectors
import socket
import subprocess
import sys

server = socket.create_server(("127.0.0.1", 0))
watched = selectors.DefaultSelector()
watched.register(server, selectors.EVENT_READ)
client = (
    "import socket, sys, time\n"
    "for _ in range(5):\n"
    "    time.sleep(5)\n"
    "    socket.create_connection(('127.0.0.1', int(sys.argv[1]))).close()\n"
)
subprocess.Popen([sys.executable, "-c", client, str(server.getsockname()[1])])
for _ in range(5):
    watched.select()
    connection, _address = server.accept()
    connection.close()

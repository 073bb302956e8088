"""A server that refuses at first: tries again after 0.5, 1, 2 and 4 seconds, and then continues."""

import socket
import time
import urllib.error
import urllib.request

closed = socket.create_server(("127.0.0.1", 0))
port = closed.getsockname()[1]
closed.close()
for round_number in range(2):
    for wait_s in (0.5, 1, 2, 4):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
        except urllib.error.URLError as error:
            print(f"retrying in {wait_s} s: {error.reason}", flush=True)
        time.sleep(wait_s)
print("continued without the server")

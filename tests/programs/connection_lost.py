"""The server went away in the middle."""
# expect: cause=network exit=1 marker=HERE

import socket
import urllib.request

closed = socket.create_server(("127.0.0.1", 0))
port = closed.getsockname()[1]
closed.close()
urllib.request.urlopen(f"http://127.0.0.1:{port}/model.bin")  # HERE

"""Steps that sleep for 3 s print nothing, beside a server that waits for its first client, as a TensorBoard does."""

import subprocess
import sys
import time

SERVER = "from http.server import *; HTTPServer(('127.0.0.1', 0), SimpleHTTPRequestHandler).serve_forever()"
server = subprocess.Popen([sys.executable, "-c", SERVER])
for _ in range(7):
    time.sleep(3)
server.terminate()
server.wait()

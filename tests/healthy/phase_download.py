"""Downloads slowly with urllib.request.urlretrieve."""

# expect: slow=yes says=download
import os, socket, time, urllib.request

s = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    c, _ = s.accept()
    c.recv(9999)
    c.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 14000000\r\n\r\n")
    for _ in range(140):
        c.sendall(b"x" * 100_000)
        time.sleep(0.1)
    os._exit(0)
urllib.request.urlretrieve(f"http://127.0.0.1:{s.getsockname()[1]}/w.bin", "w.bin")

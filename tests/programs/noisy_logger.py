"""The main thread is deadlocked while a logger thread continues sending metrics: counters move, training does not."""
# expect: verdict=SUSPECT|STUCK marker=HERE

import socket
import threading
import time

server = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(server.getsockname())
accepted, _ = server.accept()


def drain() -> None:
    while accepted.recv(65536):
        pass


def send_metrics() -> None:
    while True:
        connection.sendall(b'{"gpu": 0, "ram": 31}' * 8)
        time.sleep(0.5)


threading.Thread(target=drain, daemon=True).start()
threading.Thread(target=send_metrics, daemon=True).start()
print("training")
lock = threading.Lock()
lock.acquire()
lock.acquire()  # HERE

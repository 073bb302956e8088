"""Two threads wait for each other's lock, while a third prints and sends 120 kB a second."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE also=THERE says='they wait for each other'

import socket
import threading
import time

model, stats = threading.Lock(), threading.RLock()
near, far = socket.socketpair()
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()


def drain() -> None:
    while accepted.recv(1 << 20):
        pass


def report() -> None:
    while True:
        print("metrics sent", flush=True)
        client.sendall(bytes(60_000))
        time.sleep(0.5)


def collect() -> None:
    with stats:
        while not model.locked():
            time.sleep(0.01)
        with model:  # THERE
            pass


for work in (drain, report, collect):
    threading.Thread(target=work, daemon=True, name=work.__name__).start()
with model:
    time.sleep(0.2)
    stats.acquire()  # HERE

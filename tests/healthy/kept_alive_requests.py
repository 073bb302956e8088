"""Two threads share kept-alive connections and send a small request every few seconds; main joins them."""

import socket
import threading
import time


class Client(threading.Thread):
    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="client")
        self.connection = connection

    def run(self) -> None:
        for _ in range(7):
            time.sleep(3)
            self.connection.sendall(b"embed this")
            self.connection.recv(100)


def answer(connection: socket.socket) -> None:
    while question := connection.recv(100):
        connection.sendall(question)


server = socket.create_server(("127.0.0.1", 0))
clients = []
for _ in range(2):
    clients.append(Client(socket.create_connection(server.getsockname())))
    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
for client in clients:
    client.start()
for client in clients:
    client.join()
print("done")

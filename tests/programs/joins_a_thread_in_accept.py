"""join() of a thread that waits in accept()."""
# expect: slow=yes verdict=STUCK marker=HERE says="the end of thread 'server'"

import socket, threading

server = socket.create_server(("127.0.0.1", 0))


def serve():
    server.accept()  # THERE


t = threading.Thread(target=serve, name="server")
t.start()
print("joining")
t.join()  # HERE

"""A server loop with a timeout of half a second, for a client that never comes."""
# expect: verdict=STUCK|SUSPECT marker=HERE

import select
import socket

server = socket.create_server(("127.0.0.1", 0))


def wait_for_workers() -> None:
    while True:
        ready, _, _ = select.select([server], [], [], 0.5)  # HERE
        if ready:
            return


print("waiting for workers")
wait_for_workers()

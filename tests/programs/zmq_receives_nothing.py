"""A worker waits for a message over zmq."""
# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE needs=zmq

import zmq

socket = zmq.Context().socket(zmq.PULL)
socket.bind("tcp://127.0.0.1:0")
print(socket.recv())  # HERE

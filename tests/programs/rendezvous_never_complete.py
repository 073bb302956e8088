"""The first of two ranks joins the group; nobody has started the second."""
# expect: slow=yes verdict=SUSPECT|STUCK label=STUCK_RANKS marker=HERE says="waiting for the other ranks of the job to start" needs=torch

import os
import socket

import torch.distributed as dist

with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="2")
print("joining")
dist.init_process_group("gloo")  # HERE

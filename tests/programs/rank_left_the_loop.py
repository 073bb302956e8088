"""Three spawned ranks reduce in a loop; one of them reads a FIFO that nobody writes to."""

# expect: slow=yes verdict=STUCK|SUSPECT also=HERE says=rank needs=torch
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=3)
    for step in range(1000):
        if rank == 2 and step == 3:
            open("labels").read()  # HERE
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    os.mkfifo("labels")
    mp.spawn(train, nprocs=3)

"""Two ranks under torchrun: one leaves the loop early and sleeps, the other waits for it in a collective."""
# expect: verdict=STUCK|SUSPECT label=STUCK_RANKS marker=HERE also=THERE says='rank 1 (pid' needs=torch "command={python} -m torch.distributed.run --standalone --nproc-per-node 2 {program}"

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(1000)  # THERE
print("training")
dist.all_reduce(torch.ones(1))  # HERE

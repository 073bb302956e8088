"""Two ranks: one waits for a lock of its own that nobody gives back, the other for it in a barrier."""

# expect: slow=yes verdict=STUCK|SUSPECT label=DEADLOCK also=THERE says='it waits for itself' needs=torch "command={python} -m torch.distributed.run --standalone --nproc-per-node 2 {program}"
import threading

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # THERE
dist.barrier()  # HERE

"""A stranger's distributed script that fails on one rank in a chosen way."""

import datetime
import os
import signal
import sys
import time


kind, who = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
rank = int(os.environ["RANK"])
if kind == "import":
    import no_such_module_xyz
import torch
import torch.distributed as dist


def fail():
    if kind == "exception":
        raise ValueError("boo")
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "oom":
        torch.empty(1 << 46)
    if kind == "assert":
        assert rank != who, "loss must be positive"
    if kind == "shape":
        torch.ones(2, 3) @ torch.ones(2, 3)
    if kind == "timeout":
        time.sleep(600)
    if kind == "nan":
        print("loss is nan at step 3, giving up", flush=True)
        sys.exit(1)
    if kind == "exit3":
        sys.exit(3)
    if kind == "segfault":
        import ctypes

        ctypes.string_at(0)
    if kind == "abort":
        os.abort()
    if kind == "file":
        open("/no/such/data.bin", "rb")


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5 if kind == "timeout" else 600))
for step in range(5):
    print(f"rank {rank} step {step}", flush=True)
    if step == 3 and rank == who:
        fail()
    t = torch.ones(4) * step
    dist.all_reduce(t)
print("done", flush=True)

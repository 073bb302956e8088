"""torch.save on a disk without room: C++ reports a short write, not the kernel's words."""
# expect: cause=disk_full exit=1 marker=HERE cwd_on=tmpfs:4M needs=torch says="the disk is full"

import torch


def checkpoint(step: int) -> None:
    torch.save({"step": step, "weights": torch.zeros(4 << 20)}, "last.pt")  # HERE


checkpoint(100)

"""A DDP loop of somebody's own with four lines of Jackline, for one process or several ranks.

    RANK=0 WORLD_SIZE=2 INIT=file:///tmp/meet TOTAL=6 python ranks_program.py

Signals itself after step AT on rank WHO, if SIGNAL is set. Prints 'STEP n loss' (the mean over ranks) and, at the
end, 'END rank digest-of-the-weights'.
"""

from __future__ import annotations

import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import jackline


class Sums(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row, row.sum().view(1)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo", init_method=os.environ.get("INIT", "env://"), rank=rank, world_size=size)
    dropout = torch.nn.Dropout(float(os.environ.get("DROPOUT", "0")))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), dropout, torch.nn.Linear(32, 1))
    torch.manual_seed(100 + rank)  # ranks draw different dropout masks, as they should
    net = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(Sums(), batch_size=8, shuffle=True, drop_last=True, generator=order)
    number = getattr(signal, os.environ.get("SIGNAL", ""), None)
    is_chosen = rank == int(os.environ.get("WHO", "0"))
    with jackline.attach(model=net, optimizer=optimizer, loader=loader, save_every_steps=2, name="job") as run:
        for rows, sums in run.steps(total=int(os.environ["TOTAL"])):
            loss = torch.nn.functional.mse_loss(net(rows), sums)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            if size > 1:
                dist.all_reduce(mean)
            if rank == 0:
                print("STEP", run.step, float(mean) / size, flush=True)
            if number is not None and is_chosen and run.step == int(os.environ["AT"]):
                os.kill(os.getpid(), number)
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print("END", rank, hashlib.sha256(weights).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()

"""A DDP or FSDP2 loop of somebody's own with four lines of Jackline, for one process or several ranks.

    RANK=0 WORLD_SIZE=2 INIT=file:///tmp/meet TOTAL=6 python ranks_program.py

MODE=fsdp divides the model of several ranks with fully_shard. EVERY: steps between saves. Signals itself after step
AT on rank WHO, if SIGNAL is set. Prints 'STEP n loss' (the mean over ranks) and, at the end, 'END rank
digest-of-model-and-optimizer'. STATE=file: rank 0 writes model and optimizer state there, whole. SAFE=1: gradients by
run.safe_step(), and rank WHO runs out of memory in step AT.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import jackline


class Sums(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row, row.sum().view(1)


class OneRankRunsOut:
    """The loss of a slice; the first time on the chosen rank there is no memory for it."""

    def __init__(self, net: torch.nn.Module, runs_out: bool) -> None:
        self.net, self.runs_out = net, runs_out

    def __call__(self, part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        made = self.net(part[0])
        if self.runs_out:
            self.runs_out = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return torch.nn.functional.mse_loss(made, part[1], reduction="sum"), len(part[0])


def whole_of(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous()


def gradients(run: Any, net: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor], is_chosen: bool) -> float:
    """Returns the mean loss over all ranks."""
    if "SAFE" in os.environ:
        result = run.safe_step(
            OneRankRunsOut(net, is_chosen and run.step + 1 == int(os.environ.get("AT", "0"))), batch
        )
        if result.shrunk:
            print("SHRUNK", os.environ.get("RANK"), result.micro_batch, result.num_slices, flush=True)
        return float(result.loss)
    loss = torch.nn.functional.mse_loss(net(batch[0]), batch[1])
    loss.backward()
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


def _is_there(pattern: str) -> bool:
    place, _, name = pattern.rpartition("/")
    return any(Path(place).glob(name))


def signal_itself(step: int) -> None:
    if "SIGNAL" in os.environ and step == int(os.environ["AT"]):
        while "AFTER" in os.environ and not _is_there(os.environ["AFTER"]):
            time.sleep(0.05)
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo", init_method=os.environ.get("INIT", "env://"), rank=rank, world_size=size)
    dropout = torch.nn.Dropout(float(os.environ.get("DROPOUT", "0")))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), dropout, torch.nn.Linear(32, 1))
    torch.manual_seed(100 + rank)  # ranks draw different dropout masks, as they should
    net: torch.nn.Module = model
    if os.environ.get("MODE") == "fsdp" and size > 1:
        fully_shard(model[0])
        fully_shard(model)
    elif size > 1:
        net = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(Sums(), batch_size=8, shuffle=True, drop_last=True, generator=order)
    every = int(os.environ.get("EVERY", "2"))
    is_chosen = rank == int(os.environ.get("WHO", "0"))
    with jackline.attach(model=net, optimizer=optimizer, loader=loader, save_every_steps=every, name="job") as run:
        for rows, sums in run.steps(total=int(os.environ["TOTAL"])):
            signal_itself(0 if is_chosen and not run.step else -1)  # only what nobody has trained yet is saved
            optimizer.zero_grad()
            mean = gradients(run, net, (rows, sums), is_chosen)
            optimizer.step()
            if rank == 0:
                print("STEP", run.step, mean, flush=True)
            signal_itself(run.step if is_chosen else -1)
    whole = {f"model.{name}": whole_of(value) for name, value in model.state_dict().items()}
    for number, values in enumerate(optimizer.state.values()):
        whole |= {f"optimizer.{number}.{word}": whole_of(value) for word, value in values.items()}
    weights = b"".join(one.numpy().tobytes() for one in whole.values())
    if rank == 0 and "STATE" in os.environ:
        save_file({name: value.clone() for name, value in whole.items()}, os.environ["STATE"])
    print("END", rank, hashlib.sha256(weights).hexdigest()[:16], flush=True)
    if size > 1:
        dist.destroy_process_group()  # else torch may abort at the exit, after the last line


if __name__ == "__main__":
    main()

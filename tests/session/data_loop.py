"""A loop that writes down which samples, as augmented, every step saw: `data_loop.py MODE STEPS [--workers N]`.

It may be told to die: KILL_AT=step. What is written is the batch itself, so that order and augmentation show.
"""

import argparse
import json
import os
import random
import signal

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import jackline

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("steps", type=int)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--name")
arguments = parser.parse_args()
NUM = 70


class Numbers(Dataset):
    """Sample i is (i, noise): where the noise comes from is the mode."""

    def __init__(self, noise):
        self.noise = noise
        self.rng = np.random.default_rng(3) if noise == "own" else None

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return torch.tensor([float(index), self.draw(index)])

    def draw(self, index):
        if self.noise == "torch":
            return torch.rand(()).item()
        if self.noise == "numpy":
            return float(np.random.rand())
        if self.noise == "python":
            return random.gauss(0, 1)
        if self.noise == "all":
            return torch.rand(()).item() + float(np.random.randn()) + random.random()
        if self.noise == "own":
            return float(self.rng.random())
        if self.noise == "late":  # draws for few samples only
            return random.random() if index % 23 == 22 else 0.0
        return 0.0


class Together(Numbers):
    def __getitems__(self, indices):
        noise = torch.rand(len(indices))
        return [torch.tensor([float(index), value]) for index, value in zip(indices, noise.tolist())]


class Buckets:
    """A batch sampler that shuffles batches of neighbours with Python's generator, and draws while it goes."""

    def __iter__(self):
        batches = [list(range(start, min(start + 8, NUM))) for start in range(0, NUM, 8)]
        random.shuffle(batches)
        for batch in batches:
            random.shuffle(batch)
            yield batch

    def __len__(self):
        return -(-NUM // 8)


class Restless:
    """Shuffles a list it keeps, so that every epoch depends on the one before."""

    def __init__(self):
        self.indices = list(range(NUM))

    def __iter__(self):
        random.shuffle(self.indices)
        yield from self.indices

    def __len__(self):
        return NUM


class Stream(IterableDataset):
    """Counts, with noise, and can say where it is."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        info = get_worker_info()
        step = info.num_workers if info else 1
        self.position = max(self.position, info.id if info else 0)
        while self.position < NUM:
            found = self.position
            self.position += step
            yield torch.tensor([float(found), random.random()])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Blind(IterableDataset):
    """Counts, with noise, and cannot say where it is."""

    def __iter__(self):
        for index in range(NUM):
            yield torch.tensor([float(index), torch.rand(()).item()])


class SelfPositioned:
    """A loader, not a dataset, that positions itself."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 9:
            self.next += 1
            yield torch.tensor([[float(self.next), torch.rand(()).item()]])
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def noisy_collate(samples):
    return torch.stack(samples) + random.random() * torch.tensor([0.0, 1.0])


def make_loader(mode, workers):
    noise = mode.partition("-")[2]
    common = {"num_workers": workers, "batch_size": 8}
    if mode.startswith("noise"):
        return DataLoader(Numbers(noise), shuffle=True, **common)
    data = Numbers("torch")
    makers = {
        "shuffled": lambda: DataLoader(data, shuffle=True, **common),
        "droplast": lambda: DataLoader(data, shuffle=True, drop_last=True, **common),
        "sequential": lambda: DataLoader(data, **common),
        "persistent": lambda: DataLoader(
            data, shuffle=True, persistent_workers=workers > 0, prefetch_factor=4 if workers else None, **common
        ),
        "unbatched": lambda: DataLoader(data, shuffle=True, batch_size=None, num_workers=workers),
        "together": lambda: DataLoader(Together("torch"), shuffle=True, **common),
        "collate": lambda: DataLoader(Numbers(""), shuffle=True, collate_fn=noisy_collate, **common),
        "weighted": lambda: DataLoader(data, sampler=WeightedRandomSampler(range(1, NUM + 1), NUM), **common),
        "replacement": lambda: DataLoader(data, sampler=RandomSampler(data, replacement=True), **common),
        "subset": lambda: DataLoader(data, sampler=SubsetRandomSampler(range(0, NUM, 2)), **common),
        "distributed": lambda: DataLoader(
            data, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=True), **common
        ),
        "buckets": lambda: DataLoader(data, batch_sampler=Buckets(), num_workers=workers),
        "restless": lambda: DataLoader(data, sampler=Restless(), **common),
        "batches": lambda: DataLoader(
            data, batch_sampler=BatchSampler(SequentialSampler(range(40)), 5, False), num_workers=workers
        ),
        "own": lambda: jackline.Loader(data, 8, shuffle=True, seed=5, num_workers=workers),
        "stream": lambda: DataLoader(Stream(), **common),
        "blind": lambda: DataLoader(Blind(), **common),
        "self": SelfPositioned,
        "list": lambda: [torch.tensor([[float(n), 0.0]]) for n in range(9)],
    }
    return makers[mode]()


torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
loader = make_loader(arguments.mode, arguments.workers)
seen = open("seen.txt", "a", buffering=1)  # noqa: SIM115

with jackline.attach(
    model=model,
    optimizer=optimizer,
    loader=loader,
    name=arguments.name,
    save_every_steps=3,
    on_change={"arguments": "warn"},
) as run:
    for batch in run.steps(total=arguments.steps):
        loss = model(batch / 70).square().mean() + 0.01 * random.random() + 0.01 * np.random.rand()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        noise = [value.hex() for value in batch.reshape(-1, 2)[:, 1].tolist()]
        seen.write(json.dumps({"step": run.step, "ids": batch.reshape(-1, 2)[:, 0].tolist(), "noise": noise}) + "\n")
        if str(run.step) in os.environ.get("KILL_AT", "").split(","):
            os.kill(os.getpid(), signal.SIGKILL)
print("weights", [value.hex() for value in model[0].weight.flatten().tolist()])

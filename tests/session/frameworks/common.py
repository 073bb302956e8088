"""What the scripts share: the cell they are, small data, a model, and how they end or are ended.

A cell is JSON in $CELL. $DIE is "kill:7" or "term:7": at the end of step 7 the script sends itself that signal. Every
sample that is trained on goes into samples.jsonl, with its process and step. Of several ranks the last is signalled.
"""

from __future__ import annotations

import json
import os
import signal
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402

os.environ["ACCELERATE_USE_CPU"] = "true"
CELL = {
    "accumulate": 1,
    "workers": 0,
    "scheduler": "step",
    "save_every": 1,
    "extra": "",
    **json.loads(os.environ["CELL"]),
}
EXTRA, ACCUMULATE, WORKERS = CELL["extra"], CELL["accumulate"], CELL["workers"]
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH, EPOCHS = CELL.get("samples", 26), 2, 3
torch.set_num_threads(1)
torch.manual_seed(10 * RANK)  # many scripts seed each rank differently, for dropout


class Noisy(torch.utils.data.Dataset):
    """Draws from torch's global generator, as augmentation does."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        if index >= self.count:
            raise IndexError(index)
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x + 0.1 * torch.randn(4), "labels": x.sum(), "number": index}


class Streamed(torch.utils.data.IterableDataset):
    """The same as a stream; every worker takes its share."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.inside = Noisy(count)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, self.inside.count, step):
            yield self.inside[index]


class StatefulStream(Streamed):
    """A stream that knows its position."""

    def __init__(self, count: int = SAMPLES) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self):
        while self.at < self.inside.count:
            self.at += 1
            yield self.inside[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Net(torch.nn.Module):
    """Everything that keeps state: batch statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 1),
        )

    def forward(self, x, labels=None, number=None):
        guess = self.layers(x)[:, 0]
        return {"loss": (guess - labels).square().mean(), "logits": guess}


def note(step: int, batch: dict) -> None:
    """This batch belongs to the step after `step`."""
    numbers = [int(number) for number in batch["number"]]
    with open(f"samples-{RANK}.jsonl" if RANK else "samples.jsonl", "a") as file:
        file.write(json.dumps([os.getpid(), step, numbers]) + "\n")


def perhaps_die(step: int) -> None:
    how, _, at = os.environ.get("DIE", "").partition(":")
    if (
        at and step >= int(at) and RANK == RANKS - 1
    ):  # where several optimizers step, the count may pass over the number
        os.environ["DIE"] = ""
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[how])


def finish(model: torch.nn.Module, **more: object) -> None:
    sums = [tensor.double().sum().item().hex() for tensor in model.state_dict().values()]
    print("final", json.dumps({"weights": sums, **more}, default=str), flush=True)


def weights_for_samples() -> list[float]:
    return [1.0 + (index % 5) for index in range(SAMPLES)]

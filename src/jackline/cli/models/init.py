"""`jackline init recipe`: a recipe of one's own that runs, as a file to change."""

from __future__ import annotations

import re
from pathlib import Path

import click

from jackline.errors import UsageError
from jackline.rundir import atomic

TEMPLATE = '''"""Which shape is in the picture? A recipe of your own: change what you like.

    jackline train FILE --quick            everything once, in seconds
    jackline train FILE width=32 lr=1e-3   your settings and those of every training
"""

import torch
from torch import nn
from torch.nn import functional

import jackline


class NAME(jackline.Recipe):
    width: int = 16  # attributes with a type are settings
    noise: float = 0.3
    batch_size: int = 64
    epochs: int = 5
    lr: float = 3e-3
    metric: str = "val_accuracy"  # decides which checkpoint is the best
    higher_is_better: bool = True

    def make_model(self):
        return nn.Sequential(
            *(nn.Conv2d(1, self.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(self.width, 2 * self.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(2 * self.width * 16, 3)),
        )

    def train_data(self):
        """Tensors with one row a sample, or any dataset with len() and [index] (torchvision, your own)."""
        return self.draw(2000)

    def val_data(self):
        return self.draw(500)

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def measure(self, model, batch):
        images, labels = batch
        logits = model(images)
        right = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": right}

    def draw(self, count):
        """A square, a cross or a line, somewhere in 16 x 16 pixels of noise."""
        images, labels = torch.randn(count, 1, 16, 16) * self.noise, torch.randint(3, (count,))
        for image, label in zip(images, labels):
            row, column = torch.randint(3, 13, (2,)).tolist()
            if label == 0:
                image[0, row - 2 : row + 3, column - 2 : column + 3] += 1
            if label != 0:
                image[0, row, column - 3 : column + 4] += 1
            if label == 1:
                image[0, row - 3 : row + 4, column] += 1
        return images, labels
'''


@click.group(short_help="Write a file to begin with: init recipe.")
def command() -> None:
    """Write a file to begin with."""


@command.command("recipe", short_help="A recipe of your own that runs.")
@click.argument("name", default="my_recipe")
def recipe(name: str) -> None:
    """Write NAME.py here: an image classifier of under 60 lines that trains as it is. Change the model, the data and
    the loss to your own.
    """
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if path.exists():
        raise UsageError(f"{path} exists already", hint="jackline init recipe OTHER_NAME")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder '{path.parent}'", hint=f"mkdir -p {path.parent}")
    words = re.findall(r"[A-Za-z0-9]+", path.stem)
    title = "".join(word[0].upper() + word[1:] for word in words)
    made = TEMPLATE.replace("NAME", title if title[:1].isalpha() else f"Recipe{title}").replace("FILE", str(path))
    atomic.write_whole(path.absolute(), made.encode())
    click.echo(f"{path}: a recipe that runs; the model, data and loss are yours to change")
    click.echo(f"try it: jackline train {path} --quick")

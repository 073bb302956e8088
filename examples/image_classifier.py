"""An image classifier with everything that makes an exact resume hard: random crops and flips in worker processes,
batch normalisation, dropout, gradient accumulation, an average of the weights, an evaluation after each epoch.

    python examples/image_classifier.py --workers 2

The images are synthetic (bars and rings in noise), so nothing is downloaded. Kill it, change the number of workers,
start it again: the weights at the end are the same, bit for bit.
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import jackline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--images", type=int, default=1200)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--save-every-steps", type=int)
parser.add_argument("--name", help="of the run; the other arguments may change then")
arguments = parser.parse_args()


class Shapes(Dataset):
    """Four kinds of bars and rings, 20 x 20; each is cropped to 16 x 16 and flipped at random when it is read."""

    def __init__(self, count: int, seed: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (count,), generator=generator)
        self.images = 0.4 * torch.randn(count, 1, 20, 20, generator=generator)
        line = torch.arange(20.0)
        radius = ((line[:, None] - 9.5) ** 2 + (line[None, :] - 9.5) ** 2).sqrt()
        patterns = [(line % 4 < 2).expand(20, 20), (line % 4 < 2).expand(20, 20).T, radius < 6, abs(radius - 7) < 1.5]
        self.images += torch.stack([pattern.float() for pattern in patterns])[self.labels, None]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if not self.augment:
            return image[:, 2:18, 2:18], self.labels[index]
        top, left, flip = torch.randint(0, 5, (3,)).tolist()
        image = image[:, top : top + 16, left : left + 16]
        return (image.flip(-1) if flip > 2 else image), self.labels[index]


torch.manual_seed(0)
train = DataLoader(
    Shapes(arguments.images, seed=1, augment=True),
    batch_size=20,
    shuffle=True,
    num_workers=arguments.workers,
    persistent_workers=arguments.workers > 0,
)
test = DataLoader(Shapes(400, seed=2, augment=False), batch_size=100)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 4),
)  # fmt: skip
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)

with jackline.attach(
    model=model,
    average=average,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=train,
    best=0.0,
    save_every_steps=arguments.save_every_steps,
    name=arguments.name,
    on_change={"arguments": "warn"},
) as run:
    for epoch in run.epochs(arguments.epochs):
        model.train()
        for number, (images, labels) in enumerate(run.steps(), 1):
            loss = nn.functional.cross_entropy(model(images), labels)
            (loss / 2).backward()
            if number % 2 == 0:  # two batches to a step
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
                run.log(loss=loss)
        model.eval()
        with torch.no_grad(), run.phase("evaluate", total=len(test), unit="batches") as progress:
            right = 0
            for images, labels in test:
                right += (average(images).argmax(1) == labels).sum().item()
                progress.advance()
        scheduler.step()
        accuracy = right / len(test.dataset)
        run.values["best"] = max(run.values["best"], accuracy)
        print(f"epoch {epoch}: {accuracy:.1%} of the test images, at best {run.values['best']:.1%}")

weights = b"".join(
    tensor.numpy().tobytes() for tensor in [*model.state_dict().values(), *average.state_dict().values()]
)
print(f"weights {hashlib.sha256(weights).hexdigest()[:16]} after {run.step} steps")

"""Shapes: whole scripts in the style of others, with state in places of their own."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.session.loops.table import Go, loss_of, make_data, make_loader, make_model, sgd, shape, step


class ImagePool:
    """Generated images of earlier steps for the critic. It gives back what it gets until it is full."""

    def __init__(self, size: int) -> None:
        self.size, self.images = size, list[torch.Tensor]()

    def query(self, images: torch.Tensor) -> torch.Tensor:
        found = []
        for image in images:
            if len(self.images) < self.size:
                self.images.append(image)
                found.append(image)
            elif random.random() > 0.5:
                place = random.randrange(self.size)
                found.append(self.images[place])
                self.images[place] = image
            else:
                found.append(image)
        return torch.stack(found)


class LinearDecay:
    def __init__(self, num_epochs: int, start: int) -> None:
        self.num_epochs, self.start = num_epochs, start

    def step(self, epoch: int) -> float:
        return 1.0 - max(0, epoch - self.start) / (self.num_epochs - self.start)


@shape("CycleGAN with image pools")
def cycle_gan(go: Go) -> None:
    there, back, critic = make_model(drop=0.0), make_model(drop=0.0), make_model(drop=0.0)
    there[-1], back[-1] = nn.Linear(8, 4), nn.Linear(8, 4)
    pool = ImagePool(30)
    first = torch.optim.Adam([*there.parameters(), *back.parameters()], 0.01, betas=(0.5, 0.999))
    second = torch.optim.Adam(critic.parameters(), 0.01, betas=(0.5, 0.999))
    decay = torch.optim.lr_scheduler.LambdaLR(first, LinearDecay(4, 2).step)
    with go.attach(
        there=there, back=back, critic=critic, first=first, second=second, decay=decay, loader=make_loader()
    ) as run:
        for _ in run.epochs(4):
            for x, _ in run.steps():
                fake = there(x)
                loss = (back(fake) - x).abs().mean() + (critic(fake) - 1).square().mean()
                first.zero_grad()
                loss.backward()
                first.step()
                second.zero_grad()
                wrong = critic(pool.query(fake.detach())).square().mean() + (critic(x) - 1).square().mean()
                wrong.backward()
                second.step()
                go.log(run, loss=loss, wrong=wrong)
            decay.step()
    go.end(there, back, critic)


class Trainer:
    """Diffusion: everything in one object, batches from an endless generator, an average from a deep copy."""

    def __init__(self, go: Go) -> None:
        self.go, self.model = go, make_model(drop=0.0)
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        self.batches = self.cycle(make_loader())
        self.accumulate, self.step = 2, 0

    @staticmethod
    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def train(self) -> None:
        with self.go.attach(model=self.model, ema=self.ema, optimizer=self.optimizer, scaler=self.scaler) as run:
            for _ in run.steps(total=24):
                for _ in range(self.accumulate):
                    x, y = next(self.batches)
                    noise = torch.randn_like(x)
                    loss = loss_of(self.model, (x + noise * torch.rand(len(x), 1), y)) / self.accumulate
                    self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                if self.step % 3 == 0:
                    for old, new in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                        old.data = old.data * 0.9 + new.data * 0.1
                self.step += 1
                self.go.log(run, loss=loss)
        self.go.end(self.model, self.ema)


@shape("diffusion trainer class with an endless generator")
def diffusion_trainer(go: Go) -> None:
    Trainer(go).train()


@shape("meta-learning with tasks drawn by numpy")
def meta(go: Go) -> None:
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with go.attach(model=model, optimizer=optimizer) as run:
        for _ in run.steps(total=24):
            optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(3):
                height, shift = np.random.uniform(0.1, 5.0), np.random.uniform(0, np.pi)
                x = torch.rand(6, 1) * 10 - 5
                y = height * torch.sin(x + shift)
                weights = dict(model.named_parameters())
                inner = (torch.func.functional_call(model, weights, (x[:3],)) - y[:3]).square().mean()
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                moved = {name: one - 0.05 * g for (name, one), g in zip(weights.items(), slopes, strict=True)}
                total = total + (torch.func.functional_call(model, moved, (x[3:],)) - y[3:]).square().mean()
            total.backward()
            optimizer.step()
            go.log(run, loss=total)
    go.end(model)


def two_views(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([one[0] for one in samples])
    scale = random.uniform(0.8, 1.2)
    return x * scale + 0.1 * torch.randn_like(x), x + float(np.random.randn()) * 0.1


@shape("contrastive, two views made by the collate function")
def contrastive(go: Go) -> None:
    model, loader = nn.Linear(4, 3), make_loader(collate_fn=two_views, num_workers=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for one, other in run.steps(total=24):
            a, b = nn.functional.normalize(model(one)), nn.functional.normalize(model(other))
            loss = nn.functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model)


@shape("mean teacher, momentum from a counter that starts at run.step")
def mean_teacher(go: Go) -> None:
    model, loader = make_model(), make_loader()
    teacher = copy.deepcopy(model)
    optimizer = sgd(model)
    with go.attach(model=model, teacher=teacher, optimizer=optimizer, loader=loader) as run:
        global_step = run.step
        for x, y in run.steps(total=24):
            loss = step(model, optimizer, (x, y)) + (model(x) - teacher(x).detach()).square().mean()
            global_step += 1
            alpha = min(1 - 1 / (global_step + 1), 0.99)
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.data.mul_(alpha).add_(new.data, alpha=1 - alpha)
            go.log(run, loss=loss)
    go.end(model, teacher)


@shape("a gradient scaler that skips steps")
def skipped_steps(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)
    with go.attach(model=model, optimizer=optimizer, scaler=scaler, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = loss_of(model, batch) * 100
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            go.log(run, loss=loss, scale=scaler.get_scale())
    go.end(model)


class Easy(Sampler[int]):
    """Easy samples first; `level` says how many there are."""

    def __init__(self, count: int) -> None:
        self.count, self.level = count, 10

    def __len__(self) -> int:
        return self.level

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.level).tolist())


@shape("a curriculum that follows the mean of recent losses")
def recent_losses(go: Go) -> None:
    model = make_model()
    optimizer = sgd(model)
    sampler, recent = Easy(40), deque[float](maxlen=20)
    with go.attach(model=model, optimizer=optimizer, loader=make_loader(sampler=sampler)) as run:
        for _ in run.epochs(6):
            for batch in run.steps():
                loss = step(model, optimizer, batch)
                recent.append(float(loss))
                go.log(run, loss=loss)
            sampler.level = min(40, 10 + int(100 * sum(recent) / len(recent)) % 30)
    go.end(model)


class Shuffled(IterableDataset):  # type: ignore[type-arg]
    """A stream with a shuffle buffer, seeded by the epoch that the loop sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        dice, held = random.Random(100 + self.epoch), list[Any]()
        for one in make_data(48):
            if len(held) < 8:
                held.append(one)
                continue
            place = dice.randrange(8)
            yield held[place]
            held[place] = one
        dice.shuffle(held)
        yield from held


@shape("a stream with a shuffle buffer and set_epoch")
def shuffle_buffer(go: Go) -> None:
    model, data = make_model(), Shuffled()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=DataLoader(data, batch_size=4)) as run:
        for epoch in run.epochs(3):
            data.set_epoch(epoch)
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch), first=batch[0].flatten()[0])
    go.end(model)


class EarlyStopping:
    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, value: float) -> bool:
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        return self.bad >= self.patience


@shape("early stopping by an own class")
def early_stopping(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model, lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    stopper, (x, y) = EarlyStopping(2), make_data().tensors
    with go.attach(model=model, optimizer=optimizer, plateau=plateau, loader=loader) as run:
        for _ in run.epochs(12):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            with torch.no_grad():
                value = float(loss_of(model.eval(), (x, y)))
            model.train()
            plateau.step(value)
            if stopper(value):
                break
    go.end(model)


@shape("weight averaging from an epoch on, batch normalisation updated at the end")
def swa_script(go: Go) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    loader = make_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    average = torch.optim.swa_utils.AveragedModel(model)
    late = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    with go.attach(
        model=model, optimizer=optimizer, scheduler=scheduler, average=average, late=late, loader=loader
    ) as run:
        for epoch in run.epochs(4):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            if epoch >= 2:
                average.update_parameters(model)
                late.step()
            else:
                scheduler.step()
    torch.optim.swa_utils.update_bn(DataLoader(make_data(), batch_size=8), average)
    go.end(model, average)


@shape("weights of two losses, learned and not attached")
def loss_weights(go: Go) -> None:
    model, loader = make_model(), make_loader()
    weights = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), weights], 0.01)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for x, y in run.steps(total=24):
            losses = torch.stack([(model(x) - y).square().mean(), (model(x) - y).abs().mean()])
            loss = (losses * (-weights).exp() + weights).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model, {"weights": weights})


class Augment:
    """Adaptive augmentation: its strength follows the critic, and is looked at every fourth step."""

    def __init__(self) -> None:
        self.p, self.signs, self.count = 0.0, 0.0, 0

    def update(self, values: torch.Tensor) -> None:
        self.signs += float(values.sign().mean())
        self.count += 1
        if self.count % 4 == 0:
            self.p = min(1.0, max(0.0, self.p + (0.2 if self.signs > 0 else -0.1)))
            self.signs = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p * torch.randn_like(x)


@shape("adaptive augmentation and a penalty every few steps")
def adaptive(go: Go) -> None:
    maker, critic, augment = nn.Linear(2, 4), make_model(drop=0.0), Augment()
    first, second = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(critic.parameters(), 0.01)
    with go.attach(maker=maker, critic=critic, first=first, second=second, loader=make_loader()) as run:
        for x, _ in run.steps(total=24):
            real = augment(x).requires_grad_()
            found = critic(real)
            loss = (
                nn.functional.softplus(-found).mean()
                + nn.functional.softplus(critic(augment(maker(torch.randn(4, 2)).detach()))).mean()
            )
            if run.step % 5 == 0:
                slope = torch.autograd.grad(found.sum(), real, create_graph=True)[0]
                loss = loss + slope.square().sum(1).mean()
            second.zero_grad()
            loss.backward()
            second.step()
            augment.update(found.detach())
            first.zero_grad()
            nn.functional.softplus(-critic(maker(torch.randn(4, 2)))).mean().backward()
            first.step()
            go.log(run, loss=loss)
    go.end(maker, critic)


class World:
    """A small world with a state of its own."""

    def __init__(self) -> None:
        self.state = np.zeros(3)

    def step(self, action: int) -> tuple[np.ndarray, float]:
        self.state = self.state * 0.9 + np.random.randn(3) * 0.1 + action * 0.1
        return self.state, float(self.state.sum())


@shape("policy optimisation with rollouts in the step")
def rollouts(go: Go) -> None:
    policy, world = nn.Linear(3, 3), World()
    optimizer = torch.optim.Adam(policy.parameters(), 0.01, eps=1e-5)
    with go.attach(policy=policy, optimizer=optimizer) as run:
        for update in run.steps(total=20):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - update / 20)
            seen, actions, rewards = [], [], []
            for _ in range(4):
                now = torch.tensor(world.state, dtype=torch.float32)
                action = int(torch.distributions.Categorical(logits=policy(now)[:2]).sample())
                seen.append(now)
                actions.append(action)
                rewards.append(world.step(action)[1])
            out = policy(torch.stack(seen))
            gain = torch.tensor(rewards, dtype=torch.float32) - out[:, 2].detach()
            chosen = torch.distributions.Categorical(logits=out[:, :2]).log_prob(torch.tensor(actions))
            loss = -(chosen * gain).mean() + (out[:, 2] - torch.tensor(rewards, dtype=torch.float32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(policy)


class Labelled(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.x, self.y = (one.clone() for one in make_data().tensors)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


@shape("pseudo-labels written into the dataset after each epoch")
def pseudo_labels(go: Go) -> None:
    model, data = make_model(), Labelled()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=make_loader(data)) as run:
        for _ in run.epochs(4):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            with torch.no_grad():
                data.y[20:] = 0.5 * data.y[20:] + 0.5 * model.eval()(data.x[20:])
            model.train()
    go.end(model)


@shape("prototypes of classes in a dict, used after a while")
def prototypes(go: Go) -> None:
    model, loader = nn.Linear(4, 4), make_loader()
    optimizer = sgd(model)
    means: dict[int, torch.Tensor] = {}
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for x, y in run.steps(total=24):
            out, labels = model(x), (y[:, 0] > 0).long().tolist()
            loss = (out - x).square().mean()
            if run.step > 6:
                loss = loss + sum(
                    (one - means[label]).square().mean() for one, label in zip(out, labels, strict=True)
                )
            for one, label in zip(out.detach(), labels, strict=True):
                means[label] = 0.9 * means.get(label, one) + 0.1 * one
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model)


@shape("a scheduler that is not attached")
def lost_scheduler(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
            scheduler.step()
    go.end(model)


@shape("a scheduler for epochs that is not attached")
def lost_epoch_scheduler(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for _ in run.epochs(4):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            scheduler.step()
    go.end(model)


@shape("a gradient scaler that is not attached")
def lost_scaler(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = loss_of(model, batch) * 100
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            go.log(run, loss=loss, scale=scaler.get_scale())
    go.end(model)


@shape("an average of the weights that is not attached")
def lost_average(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    average = copy.deepcopy(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
    go.end(model, average)


@shape("a learning rate from the words done so far")
def words_done(go: Go) -> None:
    model, loader = nn.EmbeddingBag(20, 4), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = 0
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for x, _ in run.steps(total=24):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - done / 200)
            words = (x.abs() * 5).long().clamp(max=19)
            negative = torch.randint(20, words.shape)
            loss = (model(words) - 1).square().mean() + model(negative).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += len(words)
            go.log(run, loss=loss)
    go.end(model)

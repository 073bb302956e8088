"""Shapes: adversarial training and reinforcement learning."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.session.loops.table import Go, make_loader, make_model, sgd, shape


def _gan(go: Go, every: int, *, clip: bool) -> None:
    maker, critic, loader = make_model(), make_model(), make_loader()
    maker[-1] = nn.Linear(8, 4)
    first, second = torch.optim.RMSprop(maker.parameters(), 0.01), torch.optim.RMSprop(critic.parameters(), 0.01)
    with go.attach(maker=maker, critic=critic, first=first, second=second, loader=loader, save_every_steps=1) as run:
        for x, _ in run.steps(total=8):
            second.zero_grad()
            loss = critic(maker(torch.randn_like(x)).detach()).mean() - critic(x).mean()
            loss.backward()
            second.step()
            if clip:
                for p in critic.parameters():
                    p.data.clamp_(-0.1, 0.1)
            if run.batch % every == every - 1:
                first.zero_grad()
                (-critic(maker(torch.randn_like(x))).mean()).backward()
                first.step()
            go.log(run, loss=loss)
    go.end(maker, critic)


@shape("GAN")
def gan(go: Go) -> None:
    _gan(go, 1, clip=False)


@shape("WGAN with clipping and n_critic")
def wgan(go: Go) -> None:
    _gan(go, 3, clip=True)


@shape("WGAN with gradient penalty")
def penalty(go: Go) -> None:
    critic, loader = make_model(drop=0.0), make_loader()
    optimizer = torch.optim.Adam(critic.parameters(), 0.01)
    with go.attach(critic=critic, optimizer=optimizer, loader=loader) as run:
        for x, _ in run.steps(total=20):
            mixed = (x * torch.rand(len(x), 1) + torch.randn_like(x)).requires_grad_()
            gradient = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
            loss = critic(x).mean() + (gradient.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(critic)


class Replay:
    def __init__(self) -> None:
        self.items: deque[Any] = deque(maxlen=30)

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = deque(state["items"], maxlen=30)


def _q_learning(go: Go, copy_target: Any, *, warm_up: int = 0) -> None:
    model, replay = nn.Linear(3, 2), Replay()
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    world = {"state": torch.zeros(3)}
    with go.attach(model=model, target=target, optimizer=optimizer, replay=replay, world=world) as run:
        for _ in run.steps(total=20):
            copy_target(run, model, target)
            state = world["state"]
            action = random.randrange(2) if random.random() < 0.3 else int(model(state).argmax())
            after = (state * 0.9 + torch.randn(3) * 0.1 + action * 0.1).detach()
            replay.items.append((state, action, float(after.sum()), after))
            world["state"] = after
            loss = torch.tensor(0.0)
            if len(replay.items) > warm_up:
                state, action, reward, after = random.choice(list(replay.items))
                loss = (model(state)[action] - reward - 0.9 * target(after).max().detach()).square()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            go.log(run, loss=loss)
    go.end(model, target)


@shape("DQN with replay buffer and target network")
def dqn(go: Go) -> None:
    def hard(run: Any, model: nn.Module, target: nn.Module) -> None:
        if run.step % 5 == 0:
            target.load_state_dict(model.state_dict())

    _q_learning(go, hard)


@shape("DQN with a soft target network, by .data")
def soft_target(go: Go) -> None:
    def soft(run: Any, model: nn.Module, target: nn.Module) -> None:
        for old, new in zip(target.parameters(), model.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data

    _q_learning(go, soft)


@shape("DQN that fills its buffer first")
def warm_up(go: Go) -> None:
    _q_learning(go, lambda *_: None, warm_up=8)


@shape("numpy ring buffer")
def ring_buffer(go: Go) -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    ring = np.zeros((16, 3), dtype=np.float32)
    with go.attach(model=model, optimizer=optimizer, ring=ring) as run:
        for number in run.steps(total=24):
            ring[number % 16] = np.random.rand(3)
            loss = model(torch.from_numpy(ring.copy())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model)


@shape("policy gradient with a running baseline")
def policy_gradient(go: Go) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, baseline=0.0) as run:
        for _ in run.steps(total=24):
            chosen = torch.distributions.Categorical(logits=model(torch.randn(4, 3)))
            action = chosen.sample()
            reward = action.float() - run.values["baseline"]
            run.values["baseline"] = 0.9 * run.values["baseline"] + 0.1 * float(action.float().mean())
            loss = -(chosen.log_prob(action) * reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model)

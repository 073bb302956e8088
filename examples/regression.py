"""A regression in its smallest form: data that fit into memory, one model, one optimizer, a learning-rate schedule.

    python examples/regression.py                     bare
    jackline run -- python examples/regression.py     watched

Kill it at any moment (kill -9 too) and start it again: it continues and ends with the same weights, bit for bit.
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jackline

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--save-every-steps", type=int)
parser.add_argument("--name", help="of the run; the other arguments may change then")
arguments = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(4000, 16)
targets = (inputs @ torch.randn(16, 1)).tanh() + 0.1 * torch.randn(4000, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True, num_workers=arguments.workers)

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

with jackline.attach(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=loader,
    save_every_steps=arguments.save_every_steps,
    name=arguments.name,
    on_change={"arguments": "warn"},
) as run:
    for x, y in run.steps(total=arguments.steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)
        if run.step % 500 == 0:
            print(f"step {run.step}/{arguments.steps}  loss {loss:.4f}")

weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
print(f"weights {hashlib.sha256(weights).hexdigest()[:16]} after {run.step} steps")

"""A small GPT on bytes, on a text every machine has: the Python standard library's own sources.

    python examples/gpt_loop.py --steps 2000

Two optimizers (one for matrices, one for the rest), warm-up and decay, gradient clipping, random windows of the text.
Kill it at any moment and start it again: the weights at the end are the same, bit for bit.
"""

import argparse
import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import jackline

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--save-every-steps", type=int)
parser.add_argument("--name", help="of the run; the other arguments may change then")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--context", type=int, default=64)
arguments = parser.parse_args()


class Windows(Dataset):
    """Windows of the text, each of which begins at a random place in its stretch."""

    def __init__(self, context: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.text) // self.context - 2

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.context + int(torch.randint(0, self.context, ()))
        return self.text[start : start + self.context + 1].long()


class GPT(nn.Module):
    """Two blocks of causal attention."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def learning_rate(step: int) -> float:
    if step < 50:
        return (step + 1) / 50
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / arguments.steps)))


torch.manual_seed(0)
loader = DataLoader(Windows(arguments.context), batch_size=16, shuffle=True, num_workers=arguments.workers)
model = GPT(arguments.width, arguments.context)
matrices = [tensor for tensor in model.parameters() if tensor.ndim >= 2]
others = [tensor for tensor in model.parameters() if tensor.ndim < 2]
optimizers = [
    torch.optim.AdamW(matrices, lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)),
    torch.optim.Adam(others, lr=3e-3),
]
schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate) for optimizer in optimizers]

with jackline.attach(
    model=model,
    optimizers=optimizers,
    schedulers=schedulers,
    loader=loader,
    save_every_steps=arguments.save_every_steps,
    name=arguments.name,
    on_change={"arguments": "warn"},
) as run:
    for tokens in run.steps(total=arguments.steps):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.log(loss=loss, norm=norm)
        if run.step % 100 == 0:
            print(f"step {run.step}/{arguments.steps}  loss {loss:.3f}")

weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
print(f"weights {hashlib.sha256(weights).hexdigest()[:16]} after {run.step} steps")

"""A checkpointed model whose backward takes long."""

# expect: slow=yes says=backward needs=torch
import torch, time
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
layers = torch.nn.ModuleList(torch.nn.Linear(1500, 1500) for _ in range(20))
t = time.time()
while time.time() - t < 10:
    x = torch.randn(400, 1500, requires_grad=True)
    for l in layers:
        x = checkpoint(l, x, use_reentrant=False)
    x.sum().backward()

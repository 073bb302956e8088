"""Serialises a large object with pickle to disk in a function of its own."""

# expect: slow=yes says=saving needs=torch
import torch, time

x = [torch.randn(1000, 1000) for _ in range(30)]
t = time.time()
while time.time() - t < 9:
    torch.save(x, "ckpt.pt")

"""torch.load again and again."""

# expect: slow=yes says=loading needs=torch
import torch, time

torch.save([torch.randn(1000, 1000) for _ in range(30)], "ckpt.pt")
t = time.time()
while time.time() - t < 9:
    torch.load("ckpt.pt")

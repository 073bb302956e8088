"""A real, small training: import of torch, steps, an evaluation, a save; a line every few seconds."""
# expect: needs=torch

import time

import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
end = time.monotonic() + 12
step = 0
while time.monotonic() < end:
    batch = torch.randn(256, 256)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    time.sleep(0.02)  # a batch that is not ready
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
torch.save(model.state_dict(), "model.pt")
print("done at step", step)

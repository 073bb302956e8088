"""Programs that bench/session.py starts as processes of their own: resume at a position, and memory."""

RESUME = """
import sys, time
import torch, jackline.session.attach
torch.set_num_threads(1)
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 10_000_000
    def __getitem__(self, index): return torch.tensor(float(index))
    def __getitems__(self, indices): return [torch.tensor(indices, dtype=torch.float32)]
until = int(sys.argv[1])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = torch.utils.data.DataLoader(Numbers(), batch_size=1000, shuffle=True)
began_s, began_cpu_s = time.perf_counter(), time.process_time()  # after torch has imported all it wants
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name=sys.argv[2], on_change="continue",
                     save_every_steps=100_000) as run:
    for batch in run.steps(total=10_000):
        if run.step >= until:
            print("first", run.step, time.perf_counter() - began_s, time.process_time() - began_cpu_s, flush=True)
            break
        model.weight.grad = torch.zeros(1, 1)
        optimizer.step()
"""

MEMORY = """
import json, sys, time
import torch
def read():
    words = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in words.items()}
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(100)])
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(10_000, 100)), batch_size=8,
                                     shuffle=True)
def train(batch):
    loss = model(batch[0]).square().mean()
    optimizer.zero_grad(set_to_none=False)  # else the gradients' memory comes and goes, more than we look for
    loss.backward(); optimizer.step()
    return loss
batches = iter(loader)
for _ in range(30): train(next(batches))
before = read()
if sys.argv[1] == "attached":
    import jackline
    with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=10, new=True) as run:
        for batch in run.steps(total=60): run.log(loss=train(batch))
        after = read()
else:
    for _ in range(60): train(next(batches))
    after = read()
print(json.dumps({name: after[name] - before[name] for name in before}))
"""

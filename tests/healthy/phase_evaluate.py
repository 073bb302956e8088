"""model.eval() inside a function called validate."""

# expect: slow=yes says=evaluat needs=torch
import torch, time

torch.set_num_threads(1)
m = torch.nn.Sequential(*[torch.nn.Linear(1500, 1500) for _ in range(10)])


@torch.no_grad()
def validate():
    m.eval()
    t = time.time()
    while time.time() - t < 10:
        m(torch.randn(400, 1500))


validate()

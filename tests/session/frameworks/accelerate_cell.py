"""A loop of one's own over objects that Accelerate has prepared."""

import torch
from accelerate import Accelerator
from common import (
    ACCUMULATE,
    BATCH,
    CELL,
    EPOCHS,
    EXTRA,
    SAMPLES,
    WORKERS,
    Net,
    Noisy,
    Streamed,
    finish,
    note,
    perhaps_die,
    weights_for_samples,
)
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from jackline.session.integrations import accelerate as jackline_accelerate

data = Noisy()
options = {"batch_size": CELL.get("batch", BATCH), "num_workers": WORKERS}
if EXTRA == "iterable":
    loader = DataLoader(Streamed(), **options)
elif EXTRA == "weighted sampler":
    loader = DataLoader(data, sampler=WeightedRandomSampler(weights_for_samples(), SAMPLES), **options)
elif EXTRA == "subset sampler":
    loader = DataLoader(data, sampler=SubsetRandomSampler(range(0, SAMPLES - 2, 2)), **options)
elif EXTRA == "fewer samples":
    loader = DataLoader(data, sampler=RandomSampler(data, num_samples=16), **options)
else:
    loader = DataLoader(data, shuffle=True, **options)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedulers = {
    "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8),
    "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
    "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}
scheduler = schedulers[CELL["scheduler"]]()
accelerator = Accelerator(gradient_accumulation_steps=CELL.get("accumulate_now", ACCUMULATE))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with jackline_accelerate.attach(
    accelerator,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=loader,
    name="x",
    save_every_steps=CELL["save_every"],
) as run:
    for epoch in run.epochs(EPOCHS):
        for batch in run.steps():
            with accelerator.accumulate(model):
                note(run.step, batch)
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients and CELL["scheduler"] != "plateau":
                    scheduler.step()
                optimizer.zero_grad()
            run.log(loss=loss)
            if accelerator.sync_gradients:
                perhaps_die(run.step)
        if CELL["scheduler"] == "plateau":
            model.eval()
            with torch.no_grad():
                value = sum(model(**one)["loss"].item() for one in DataLoader(Noisy(6), 2))
            model.train()
            scheduler.step(value)
finish(accelerator.unwrap_model(model), lr=optimizer.param_groups[0]["lr"])

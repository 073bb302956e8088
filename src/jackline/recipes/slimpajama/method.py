"""What a recipe of chunks adds to the plain step: a line for each chunk, a running average, totals at the end.

Owns those words and the average, which is kept in the checkpoint; and the weights another training begins with.
Where chunks come from is chunks.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jackline.errors import UsageError
from jackline.recipes.slimpajama.chunks import ChunkFacts, ChunkLoader
from jackline.trainer.language import Additions, LanguageTask
from jackline.trainer.report.step_line import format_rate
from jackline.trainer.task import Between


class RunningLoss:
    """Summed on the device, so that no step waits for it; read when a line is due."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.count = 0

    def add(self, loss: Tensor) -> None:
        self.total = self.total + loss.detach().double()
        self.count += 1

    def mean(self) -> float:
        return float(self.total) / max(1, self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.count = state["total"].to(self.total.device, copy=True), int(state["count"])


class ChunkAdditions(Additions):
    """The plain step, told in chunks."""

    can_be_divided = True

    def __init__(self) -> None:
        self.running = RunningLoss()
        self._began_s = 0.0

    def bind(self, task: LanguageTask) -> None:
        assert isinstance(task.loader, ChunkLoader)
        self._loader = task.loader
        self.running.total = self.running.total.to(task.learner.device)

    def state(self) -> dict[str, Any]:
        return {"running_loss": self.running}

    def begin_step(self, step: int) -> None:
        self._began_s = time.monotonic()

    def after_step(self, between: Between) -> None:
        self.running.add(between.loss)
        chunk = self._loader.last
        if not chunk.is_told:
            return
        loss, average = float(between.loss), self.running.mean()
        seconds = time.monotonic() - self._began_s
        tokens = self._loader.total_tokens
        between.tell(chunk_text(chunk, loss=loss, average=average, step_s=seconds, total_tokens=tokens))

    def metrics(self) -> dict[str, float | Tensor]:
        last = self._loader.last
        return {"samples": last.samples, "skipped": last.skipped, "accumulate_s": last.seconds}

    def totals(self) -> dict[str, str]:
        loader = self._loader
        average = f", average loss {self.running.mean():.4f}" if self.running.count else ""
        each, tokens = loader.settings.num_tokens, loader.total_tokens
        return {
            "chunks": f"{loader.num_chunks:,} of {each:,} tokens, {tokens:,} in all{average}",
            "samples": f"{loader.total_samples:,} used, {loader.total_skipped:,} skipped",
        }


def chunk_text(chunk: ChunkFacts, *, loss: float, average: float, step_s: float, total_tokens: int) -> str:
    """'chunk 3: 12 samples, 1 skipped, 4,096 tokens; loss 9.1234, average 9.8; step 0.84 s ...'."""
    rate = chunk.tokens / max(1e-9, step_s + chunk.seconds)
    return (
        f"chunk {chunk.number:,}: {chunk.text}; loss {loss:.4f}, average {average:.4f}; step {step_s:.2f} s after "
        f"{chunk.seconds:.2f} s of accumulation, {format_rate(rate)} tok/s; {total_tokens:,} tokens in all"
    )


def load_weights(model: nn.Module, path: Path) -> None:
    """From a checkpoint's folder or its model.safetensors; all of them or an error."""
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"pretrained_checkpoint={path} cannot be read: {error}",
            hint="give a folder checkpoints/step-N of a run, or its model.safetensors",
        ) from None
    own = model.state_dict()
    wrong = [name for name, value in found.items() if name not in own or own[name].shape != value.shape]
    # A tied head is stored once: the other name is the same memory.
    filled = {own[name].data_ptr() for name in found if name in own}
    wrong += [name for name, value in own.items() if value.data_ptr() not in filled]
    if wrong:
        raise UsageError(
            f"pretrained_checkpoint={path} is of another model: {', '.join(wrong[:3])} does not fit",
            hint="give the model_size, max_seq_length and tokenizer it was trained with",
        )
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(value)

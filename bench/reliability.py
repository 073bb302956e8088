"""What is left after kill -9 in the middle of a save, and after damage on the disk: ours beside the others.

    python bench/reliability.py --kills 100          about 4 minutes
    python bench/reliability.py --only jackline,dcp

Every way saves the same small state again and again, as its documentation or its usual recipe does, in a forked child
that is killed at a chance instant. Then the parent resumes as that way's users do: the newest that looks right. The
state of a step is that step's number in every element, so whatever comes back can be judged. Ways whose packages are
not installed are named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

NUM_TENSORS, TENSOR_SIZE = 8, 250_000  # 8 MB


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"layer.{n}.weight": torch.full((TENSOR_SIZE,), float(step)) for n in range(NUM_TENSORS)}


def judge(tensors: dict[str, torch.Tensor]) -> int | None:
    """The step a state is of; None when it is a mixture of several, or of none."""
    values = {float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
    return int(values.pop()) if len(values) == 1 and len(tensors) == NUM_TENSORS else None


class Way:
    """How one library saves and how its users resume. `save` returns when that library says it is saved."""

    name = ""
    package = "torch"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def warm(self) -> None:
        """In the parent, once: what takes long to import."""

    def open(self) -> None:
        """In the child, before the first save."""

    def save(self, step: int) -> None:
        raise NotImplementedError

    def load(self) -> dict[str, torch.Tensor]:
        """The newest that looks right; raises when it does not load, FileNotFoundError when there is none."""
        raise NotImplementedError

    def victim(self) -> Path:
        """The file of the newest checkpoint that holds the weights."""
        raise NotImplementedError


class TorchInPlace(Way):
    name = "torch.save, one file"

    def save(self, step: int) -> None:
        torch.save(make_tensors(step), self.folder / "last.pt")

    def load(self) -> dict[str, torch.Tensor]:
        return dict(torch.load(self.folder / "last.pt", weights_only=True))

    def victim(self) -> Path:
        return self.folder / "last.pt"


class TorchNewFile(Way):
    name = "torch.save, a file a step"

    def save(self, step: int) -> None:
        torch.save(make_tensors(step), self.folder / f"step-{step:06d}.pt")
        for old in sorted(self.folder.glob("step-*.pt"))[:-3]:
            old.unlink()

    def load(self) -> dict[str, torch.Tensor]:
        return dict(torch.load(self.victim(), weights_only=True))

    def victim(self) -> Path:
        found = sorted(self.folder.glob("step-*.pt"))
        if not found:
            raise FileNotFoundError
        return found[-1]


class SafetensorsInPlace(Way):
    name = "safetensors, one file"
    package = "safetensors"

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        save_file(make_tensors(step), self.folder / "last.safetensors")

    def load(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return dict(load_file(self.folder / "last.safetensors"))

    def victim(self) -> Path:
        return self.folder / "last.safetensors"


class DcpInPlace(Way):
    name = "dcp.save, one folder"

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(make_tensors(step), checkpoint_id=str(self.folder / "last"))

    def load(self) -> dict[str, torch.Tensor]:
        return load_dcp(self.folder / "last")

    def victim(self) -> Path:
        return self.folder / "last" / "__0_0.distcp"


class DcpNewFolder(Way):
    name = "dcp.save, a folder a step"

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(make_tensors(step), checkpoint_id=str(self.folder / f"step-{step:06d}"))
        for old in sorted(self.folder.glob("step-*"))[:-3]:
            shutil.rmtree(old)

    def load(self) -> dict[str, torch.Tensor]:
        return load_dcp(self.victim().parent)

    def victim(self) -> Path:
        found = sorted(path.parent for path in self.folder.glob("step-*/.metadata"))
        if not found:
            raise FileNotFoundError
        return found[-1] / "__0_0.distcp"


def load_dcp(folder: Path) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    if not (folder / ".metadata").exists():
        raise FileNotFoundError
    tensors = make_tensors(-1)
    dcp.load(tensors, checkpoint_id=str(folder))
    return tensors


class Lightning(Way):
    """Fabric's save, which Trainer uses too: its `_atomic_save` goes through a temporary file of fsspec."""

    name = "Lightning, last.ckpt"
    package = "lightning"

    def warm(self) -> None:
        import lightning.fabric  # noqa: F401

    def open(self) -> None:
        from lightning.fabric import Fabric

        self._fabric = Fabric(accelerator="cpu", devices=1)

    def save(self, step: int) -> None:
        self._fabric.save(self.folder / "last.ckpt", {"state_dict": make_tensors(step)})

    def load(self) -> dict[str, torch.Tensor]:
        found = torch.load(self.folder / "last.ckpt", weights_only=True)
        return dict(found["state_dict"])

    def victim(self) -> Path:
        return self.folder / "last.ckpt"


class LightningElsewhere(Lightning):
    """The same where checkpoints and $TMPDIR are on two file systems, as with a mounted volume: its rename becomes a
    copy over the file that is there."""

    name = "Lightning, last.ckpt on another file system than $TMPDIR"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if folder.parent.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
            self.folder = Path("/dev/shm") / f"jackline-reliability-{os.getpid()}"

    def warm(self) -> None:
        super().warm()
        if self.folder.parent.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
            raise OSError("there is no second file system here")


class Transformers(Way):
    """Trainer's own saving of a checkpoint folder, and its own choice of the last one."""

    name = "transformers Trainer"
    package = "transformers"

    def warm(self) -> None:
        from transformers import Trainer, TrainingArguments  # noqa: F401

    def open(self) -> None:
        from transformers import Trainer, TrainingArguments

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.ModuleList(
                    torch.nn.Linear(TENSOR_SIZE, 1, bias=False) for _ in range(NUM_TENSORS)
                )

            def forward(self, **_: Any) -> Any:
                return None

        arguments = TrainingArguments(output_dir=str(self.folder), save_total_limit=3, report_to=[], use_cpu=True)
        self._trainer = Trainer(model=Model(), args=arguments)
        self._trainer.create_optimizer_and_scheduler(num_training_steps=1 << 20)

    def save(self, step: int) -> None:
        trainer = self._trainer
        with torch.no_grad():
            for tensor in trainer.model.parameters():
                tensor.fill_(float(step))
        trainer.state.global_step = step
        trainer._save_checkpoint(trainer.model, trial=None)

    def load(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        folder = self._newest()
        for needed in ("trainer_state.json", "optimizer.pt", "scheduler.pt"):
            if not (folder / needed).exists():
                raise OSError(f"{needed} is missing in {folder.name}")
        torch.load(folder / "optimizer.pt", weights_only=True)
        found = load_file(folder / "model.safetensors")
        return {name: tensor.reshape(-1) for name, tensor in found.items()}

    def victim(self) -> Path:
        return self._newest() / "model.safetensors"

    def _newest(self) -> Path:
        from transformers.trainer_utils import get_last_checkpoint

        found = get_last_checkpoint(str(self.folder))
        if found is None:
            raise FileNotFoundError
        return Path(found)


class Jackline(Way):
    name = "jackline"

    def open(self) -> None:
        from jackline.checkpoint.engine import CheckpointEngine
        from jackline.rundir.layout import RunDir

        self._engine = CheckpointEngine(RunDir(self.folder))

    def save(self, step: int) -> None:
        if not self._engine.save({"model": make_tensors(step)}, step=step, wait="writer").wait():
            raise OSError("not saved")

    def load(self) -> dict[str, torch.Tensor]:
        from jackline.checkpoint.engine import CheckpointEngine
        from jackline.rundir.layout import RunDir

        engine = CheckpointEngine(RunDir(self.folder))
        try:
            state: dict[str, Any] = {"model": make_tensors(-1)}
            if engine.load_newest(state) is None:
                raise FileNotFoundError
            return dict(state["model"])
        finally:
            engine.close()

    def victim(self) -> Path:
        from jackline.checkpoint.format.catalogue import list_names

        folder = self.folder / "checkpoints"
        return folder / str(list_names(folder)[0]) / "model.safetensors"


WAYS = (
    Jackline,
    TorchInPlace,
    TorchNewFile,
    SafetensorsInPlace,
    DcpInPlace,
    DcpNewFolder,
    Transformers,
    Lightning,
    LightningElsewhere,
)


@dataclass
class Result:
    """After kills: right, refused to load, nothing there, wrong or older than what was reported as saved."""

    kills: int = 0
    right: int = 0
    broken: int = 0
    wrong: int = 0
    lost: int = 0
    damage: dict[str, str] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)


def live_and_die(way: Way, first: int, rng_state: random.Random) -> int:
    """One child that saves until it is killed within a save; returns the last step it had reported as saved."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setsid()
        silence()
        try:
            way.open()
            for step in range(first, first + 100_000):
                way.save(step)
                os.write(write_end, step.to_bytes(8, "little"))
        finally:
            os._exit(1)
    os.close(write_end)
    reported = os.read(read_end, 8)
    began_s = time.monotonic()
    reported = os.read(read_end, 8) or reported  # between two reports lies one save
    time.sleep(rng_state.random() * 1.5 * (time.monotonic() - began_s))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(read_end, 8 << 10):
        reported = more[-8:]
    os.close(read_end)
    return int.from_bytes(reported, "little") if reported else first - 1


def silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)


def kill_again_and_again(kind: type[Way], work: Path, kills: int, rng_state: random.Random) -> Result:
    result = Result()
    way = kind(work)
    way.warm()
    way.folder.mkdir()
    step = 1
    for _ in range(kills):
        reported = live_and_die(way, step, rng_state)
        result.kills += 1
        found = None
        try:
            found = judge(way.load())
            if found is None:
                result.wrong += 1
            elif found < reported:
                result.lost += 1
            else:
                result.right += 1
        except BaseException as problem:  # dcp's error is not an Exception
            if isinstance(problem, KeyboardInterrupt):
                raise
            result.broken += 1
            first_line = (str(problem).strip().splitlines() or [""])[0]
            result.texts.add(f"{type(problem).__name__}: {first_line[:90]}")
            shutil.rmtree(way.folder)
            way.folder.mkdir()  # as a person would: away with it, start again
        step = max(reported, found or 0) + 1
    shutil.rmtree(way.folder)
    return result


def damage_newest(kind: type[Way], work: Path, rng_state: random.Random) -> dict[str, str]:
    """Two good saves, then damage to the newest: what does the user get?"""
    outcomes = {}
    for how, spoil in DAMAGES.items():
        way = kind(work)
        shutil.rmtree(way.folder, ignore_errors=True)
        way.folder.mkdir()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                silence()
                way.open()
                way.save(1)
                way.save(2)
                if isinstance(way, Jackline):
                    way._engine.close()
            os._exit(0)
        os.waitpid(child, 0)
        path = way.victim()
        data = bytearray(path.read_bytes())
        path.write_bytes(spoil(data, rng_state))
        try:
            found = judge(way.load())
        except BaseException as problem:
            if isinstance(problem, KeyboardInterrupt):
                raise
            outcomes[how] = "refused, no fall-back"
        else:
            outcomes[how] = {1: "detected, step before used", 2: "harmless"}.get(found or 0, "LOADED WRONG")
        shutil.rmtree(way.folder)
    return outcomes


def flip(data: bytearray, rng_state: random.Random) -> bytearray:
    data[len(data) // 3 + rng_state.randrange(1000)] ^= 0x40  # well inside a tensor
    return data


def hole(data: bytearray, rng_state: random.Random) -> bytearray:
    start = len(data) // 3
    data[start : start + 4096] = bytes(4096)
    return data


DAMAGES: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    "bit flipped": flip,
    "4 KiB hole": hole,
    "cut in half": lambda data, rng_state: data[: len(data) // 2],
    "empty": lambda data, rng_state: bytearray(),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="")
    options.add_argument("--folder", default=None)
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work = Path(tempfile.mkdtemp(prefix="jackline-reliability-", dir=given.folder))
    results: dict[str, Result] = {}
    try:
        for kind in WAYS:
            if given.only and not any(word in kind.name for word in given.only.split(",")):
                continue
            if find_spec(kind.package) is None:
                print(f"{kind.name}: left out, the package {kind.package} is not installed", flush=True)
                continue
            rng_state = random.Random(given.seed)
            began_s = time.monotonic()
            try:
                results[kind.name] = kill_again_and_again(kind, work / kind.__name__, given.kills, rng_state)
            except OSError as problem:
                print(f"{kind.name}: left out: {problem}", flush=True)
                continue
            results[kind.name].damage = damage_newest(kind, work / f"{kind.__name__}-damage", rng_state)
            print(f"{kind.name}: {time.monotonic() - began_s:.0f} s", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    heads = ("way", "kills while saving", "resumed right", "would not load", "loaded a mixture", "saved, then lost")
    print(f"\n| {' | '.join((*heads, *DAMAGES))} |")
    print("|---|---|---|---|---|---|" + "---|" * len(DAMAGES))
    for name, result in results.items():
        numbers = (result.kills, result.right, result.broken, result.wrong, result.lost)
        print(f"| {name} | {' | '.join(map(str, numbers))} | {' | '.join(result.damage.values())} |")
    for name, result in results.items():
        for text in sorted(result.texts)[:3]:
            print(f"{name}: {text}")
    ours = results.get(Jackline.name)
    sys.exit(1 if ours and (ours.right != ours.kills) else 0)


if __name__ == "__main__":
    main()

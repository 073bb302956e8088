"""What `jackline sample` and `jackline export` start in a process that may import torch. One request, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from jackline import accelerator
from jackline.errors import JacklineError, UsageError
from jackline.trainer.trained.hf import export_hf
from jackline.trainer.trained.load import Trained, load
from jackline.trainer.trained.sample import Sampling
from jackline.units import format_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        trained = load(
            request["run"],
            request["checkpoint"],
            device=_device(request["device"]),
            dtype=DTYPES[request["dtype"]],
            runs_dir=request["runs_dir"],
        )
        if request["act"] == "sample":
            _sample(trained, request)
        else:
            _export(trained, request)
    except JacklineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(130)


def _device(name: str) -> str:
    if name == "auto":
        return str(accelerator.choose())
    if name != "cpu" and not accelerator.is_available():
        raise UsageError("torch sees no GPU here", hint="--device cpu")
    return name


def _sample(trained: Trained, request: dict[str, Any]) -> None:
    name = trained.checkpoint.parent.parent.name
    model = trained.config.model if trained.config.is_language else type(trained.model).__name__
    print(f"{name}, step {trained.step:,}, model {model}", file=sys.stderr)
    sampling = Sampling(**request["sampling"])
    for number in range(request["count"]):
        if number:
            print("\n---")
        if request["shows_prompt"] and trained.config.is_language:  # else the recipe decides what is printed
            print(request["prompt"], end="", flush=True)
        for piece in trained.stream(request["prompt"], sampling):
            print(piece, end="", flush=True)
        print(flush=True)


def _export(trained: Trained, request: dict[str, Any]) -> None:
    out = Path(request["out"]).absolute()
    files = export_hf(trained, out)
    size = sum(path.stat().st_size for path in files)
    if request["as_json"]:
        print(json.dumps({"out": str(out), "step": trained.step, "files": [str(path) for path in files]}))
        return
    print(f"step {trained.step:,} as {out}  {format_bytes(size)}")
    print("from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f"model = AutoModelForCausalLM.from_pretrained({str(out)!r})")
    print(f"tokenizer = AutoTokenizer.from_pretrained({str(out)!r})")


if __name__ == "__main__":
    main()

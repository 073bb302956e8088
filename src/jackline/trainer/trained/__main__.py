"""What `jackline sample`, `eval` and `export` start in a process that may import torch. One request, as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from jackline import accelerator
from jackline.errors import JacklineError, UsageError
from jackline.trainer.trained.hf import check_gguf, export_hf, export_onnx, needs_code
from jackline.trainer.trained.load import Trained, load
from jackline.trainer.trained.sample import Sampling
from jackline.units import format_bytes, format_duration

EVAL_SCHEMA = "jackline.eval/1"
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
        elif request["act"] == "eval":
            _evaluate(trained, request)
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


def _evaluate(trained: Trained, request: dict[str, Any]) -> None:
    from jackline.trainer.trained.evaluate import evaluate_run

    found = evaluate_run(trained, request["data"], request["batch_size"]).to_json()
    if request["as_json"]:
        run = trained.checkpoint.parent.parent
        print(json.dumps({"schema": EVAL_SCHEMA, "run": run.name, "path": str(run), "step": trained.step, **found}))
        return
    print(f"step {trained.step:,} on {found['data']}")
    print(f"loss        {found['loss']:.4f}")
    if found["tokens"]:
        print(f"perplexity  {found['perplexity']:.2f}")
        print(f"tokens      {found['tokens']:,}")
    for name, value in found.get("measured", {}).items():
        print(f"{name:<11} {value:.4f}")
    print(f"samples     {found['samples']:,} in {format_duration(found['seconds'])}")


def _export(trained: Trained, request: dict[str, Any]) -> None:
    out, target = Path(request["out"]).absolute(), request["target"]
    if target == "gguf-ready":
        check_gguf(trained)
    files = export_onnx(trained, out) if target == "onnx" else export_hf(trained, out)
    size = sum(path.stat().st_size for path in files)
    if request["as_json"]:
        print(json.dumps({"out": str(out), "step": trained.step, "files": [str(path) for path in files]}))
        return
    print(f"step {trained.step:,} as {out}  {format_bytes(size)}")
    trust = ", trust_remote_code=True" if needs_code(trained.model) else ""
    lines = {
        "hf": (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"model = AutoModelForCausalLM.from_pretrained({str(out)!r}{trust})",
            f"tokenizer = AutoTokenizer.from_pretrained({str(out)!r})",
        ),
        "gguf-ready": (f"python llama.cpp/convert_hf_to_gguf.py {shlex.quote(str(out))} --outfile model.gguf",),
        "onnx": (
            "import onnxruntime",
            f"session = onnxruntime.InferenceSession({str(out / 'model.onnx')!r})",
            '(logits,) = session.run(None, {"input_ids": ids})  # int64, batch x sequence',
        ),
    }
    print("\n".join(lines[target]))


if __name__ == "__main__":
    main()

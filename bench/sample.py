"""Tokens a second of `jackline sample` beside transformers' generate: the same weights, dtype, prompt and length.

    python bench/sample.py                     # 124M on this machine's CPU
    python bench/sample.py --device cuda --dtype bf16

Both are given the same exported folder; greedy, so that both do the same work. Interleaved, with the spread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from jackline.data.tokenise.tokenizer import load_tokenizer
from jackline.models.gpt import GPT
from jackline.models.shapes import find_shape
from jackline.trainer.config import resolve
from jackline.trainer.trained.hf import export_hf
from jackline.trainer.trained.load import Trained
from jackline.trainer.trained.sample import Sampling, sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--model", default="small")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    dtype = DTYPES[given.dtype]
    model = GPT(find_shape(given.model)).to(given.device, dtype).eval().requires_grad_(False)
    prompt = torch.randint(0, 50_000, (1, 32), device=given.device)
    ways: dict[str, Callable[[], list[int]]] = {"jackline": lambda: _ours(model, prompt, given.tokens)}
    if (theirs := _transformers(model, given, dtype)) is not None:
        ways["transformers"] = lambda: _generate(theirs, prompt, given.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.repeats + 1):
        for name, way in ways.items():
            began_s = time.perf_counter()
            made = way()
            _wait(given.device)
            assert len(made) == given.tokens, (name, len(made))
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - began_s)
    for name, found in seconds.items():
        rates = sorted(given.tokens / each for each in found)
        print(f"{name:<14}{median(rates):9.1f} tokens/s  ({rates[0]:.1f}..{rates[-1]:.1f})")
    if "transformers" in seconds:
        print(f"ratio {median(seconds['transformers']) / median(seconds['jackline']):.2f}")


def _ours(model: GPT, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    sampling = Sampling(num_tokens, temperature=0)
    return list(sample(model, prompt, sampling, vocab_size=model.shape.vocab_size, eos_id=None))


def _transformers(model: GPT, given: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module | None:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("transformers is not installed: only ours is measured")
        return None
    tokenizer = load_tokenizer("bytes")
    with tempfile.TemporaryDirectory() as folder:
        export_hf(Trained(model, resolve("demo").config, tokenizer, 0, Path(folder)), Path(folder))
        found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return found.to(given.device).eval()


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **length)
    return made[0, prompt.shape[1] :].tolist()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

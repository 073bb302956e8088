"""A trained model for other programs: a folder for transformers, the same for llama.cpp's converter, an ONNX file.

Our GPT has the shape of GPT-2, so its weights only get other names, and matrices are turned as GPT-2 stores them.
With a bias in its head, or with sparse attention, the folder has the code of its class beside it. Written with
safetensors and plain JSON; transformers itself is not needed. ONNX is written by torch's exporter. Owns that mapping.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jackline.data.tokenise.tokenizer import Tokenizer
from jackline.errors import UsageError
from jackline.extras import EXTRAS, require
from jackline.models.gpt import GPT
from jackline.models.nsa.model import NSAModel
from jackline.models.shapes import GPTShape
from jackline.trainer.trained.begin import BLOCK, END, TURNED, byte_tokenizer
from jackline.trainer.trained.load import Trained

_MOST_IN_ONE_FILE = 1_500_000_000  # bytes: protobuf ends at 2 GB
CODE = Path(__file__).with_name("modeling_jackline.py")


def export_hf(trained: Trained, out: Path) -> list[Path]:
    """Write config.json, model.safetensors, the tokenizer and, where transformers has no class for the model, the
    code of one into `out`; returns the files."""
    model = trained.model
    if not isinstance(model, GPT | NSAModel) or not trained.config.is_language:
        raise UsageError(
            f"recipe '{trained.config.recipe}' is not a language model that transformers has a class for",
            hint="its weights as a plain file: --to safetensors",
        )
    out.mkdir(parents=True, exist_ok=True)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if isinstance(model, GPT):
        found, config = hf_weights(model), hf_config(model.shape)
    else:
        found, config = {name: value.detach() for name, value in model.state_dict().items()}, nsa_config(model)
    ends = {"bos_token_id": trained.words.eos_id, "eos_token_id": trained.words.eos_id}
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in found.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    length = {"model_max_length": model.shape.context} if isinstance(model, GPT) else {}
    files = {
        "config.json": {**config, **ends, "torch_dtype": dtype},
        "generation_config.json": {"eos_token_id": trained.words.eos_id, "do_sample": True},
        "tokenizer.json": json.loads(tokenizer_json(trained.words)),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **length,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "bos_token": END,
            "unk_token": END,
        },
    }
    for name, contents in files.items():
        (out / name).write_text(json.dumps(contents, ensure_ascii=False, indent=1), encoding="utf-8")
    if needs_code(model):
        (out / CODE.name).write_bytes(CODE.read_bytes())
        return [out / "model.safetensors", out / CODE.name, *(out / name for name in files)]
    return [out / "model.safetensors", *(out / name for name in files)]


def check_gguf(trained: Trained) -> None:
    """Raise where llama.cpp has no such model: its converter would refuse it, or compute something else."""
    model = trained.model
    wrong = ""
    if not isinstance(model, GPT):
        wrong = "llama.cpp has no such model: it is not of the shape of GPT-2"
    elif model.shape.has_head_bias:
        wrong = "GPT-2 in llama.cpp has no bias in its head, and this model has one"
    elif model.shape.activation != "gelu":
        wrong = f"GPT-2 in llama.cpp computes with gelu, and this model with {model.shape.activation}"
    elif trained.config.is_language and trained.words.json is None:
        wrong = "llama.cpp has no tokenizer of plain bytes"
    if wrong:
        raise UsageError(wrong, hint="--to hf or --to safetensors")


def export_onnx(trained: Trained, out: Path) -> list[Path]:
    """model.onnx with input_ids (batch, sequence) and logits, and the tokenizer beside it; returns the files."""
    model = trained.model
    if not isinstance(model, GPT) or not trained.config.is_language:
        raise UsageError(
            f"recipe '{trained.config.recipe}' cannot be written as ONNX: only models of the shape of GPT-2 are",
            hint="--to safetensors; torch.onnx.export(jackline.load(RUN).model, ...) with inputs of your own",
        )
    require("--to onnx", "onnx", EXTRAS["onnx"])
    if model.separator is not None:
        model.separator = None  # a text that is continued is one document
    out.mkdir(parents=True, exist_ok=True)
    ids = torch.zeros((2, min(8, model.shape.context)), dtype=torch.long)
    anything = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # of libraries among themselves
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        made = torch.onnx.export(
            _Logits(model).eval(),
            (ids,),
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes={"ids": {0: anything, 1: anything}},
            dynamo=True,
            verbose=False,
        )
        assert made is not None
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        made.save(out / "model.onnx", external_data=size > _MOST_IN_ONE_FILE)
    (out / "tokenizer.json").write_text(tokenizer_json(trained.words), encoding="utf-8")
    return sorted(path for path in out.iterdir() if path.name.startswith(("model.onnx", "tokenizer.json")))


class _Logits(nn.Module):
    """The model with logits as its only result."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids)
        return logits


def needs_code(model: object) -> bool:
    """Whether transformers has no class of its own for it."""
    return isinstance(model, NSAModel) or (isinstance(model, GPT) and model.shape.has_head_bias)


def nsa_config(model: NSAModel) -> dict[str, Any]:
    return {
        "architectures": ["JacklineNSA"],
        "model_type": "jackline-nsa",
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.JacklineNSAConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.JacklineNSA",
        },
        "shape": asdict(model.shape),
    }


def hf_weights(model: GPT) -> dict[str, Tensor]:
    found = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.positions.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
    }
    if not model.shape.is_tied:
        found["lm_head.weight"] = model.head.weight
    if model.shape.has_head_bias:
        found["lm_head.bias"] = model.head.bias
    for number, block in enumerate(model.blocks):
        for own, theirs in BLOCK.items():
            part = getattr(block, own)
            name = f"transformer.h.{number}.{theirs}"
            found[f"{name}.weight"] = part.weight.t() if own in TURNED else part.weight
            found[f"{name}.bias"] = part.bias
    return {name: tensor.detach() for name, tensor in found.items()}


def hf_config(shape: GPTShape) -> dict[str, Any]:
    own = {"auto_map": {"AutoModelForCausalLM": f"{CODE.stem}.JacklineGPT2"}} if shape.has_head_bias else {}
    return {
        **own,
        "architectures": ["JacklineGPT2" if own else "GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": shape.mlp_width,
        "activation_function": "relu" if shape.activation == "relu" else "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "tie_word_embeddings": shape.is_tied,
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The tokenizer's own file; for plain bytes one that gives the same ids, 256 being the end of a document."""
    return tokenizer.json if tokenizer.json is not None else json.dumps(byte_tokenizer())

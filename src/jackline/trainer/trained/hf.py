"""A trained GPT as a folder that transformers loads: `AutoModelForCausalLM.from_pretrained(folder)`.

Our GPT has the shape of GPT-2, so its weights only get other names, and matrices are turned as GPT-2 stores them.
Written with safetensors and plain JSON; transformers itself is not needed. Owns that mapping, and says what has no
place in GPT-2's format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from jackline.data.tokenise.tokenizer import Tokenizer
from jackline.errors import UsageError
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.trainer.trained.begin import BLOCK, END, TURNED, byte_tokenizer
from jackline.trainer.trained.load import Trained


def export_hf(trained: Trained, out: Path) -> list[Path]:
    """Write config.json, model.safetensors and the tokenizer into `out`; returns the files."""
    model = trained.model
    if not trained.config.is_language:
        raise UsageError(
            f"recipe '{trained.config.recipe}' is not a language model that transformers has a class for",
            hint="its weights as a plain file: --to safetensors",
        )
    if not isinstance(model, GPT):
        raise UsageError(
            f"model '{trained.config.model}' has sparse attention, which transformers has no class for",
            hint="its weights as a plain file: jackline checkpoints export",
        )
    if model.shape.has_head_bias:
        raise UsageError(
            f"model '{trained.config.model}' has a bias in its head, which GPT-2's format has no place for",
            hint="its weights as a plain file: jackline checkpoints export",
        )
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous().cpu() for name, tensor in hf_weights(model).items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": hf_config(model.shape, trained.words, str(next(model.parameters()).dtype)),
        "generation_config.json": {"eos_token_id": trained.words.eos_id, "do_sample": True},
        "tokenizer.json": json.loads(tokenizer_json(trained.words)),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.shape.context,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "bos_token": END,
            "unk_token": END,
        },
    }
    for name, contents in files.items():
        (out / name).write_text(json.dumps(contents, ensure_ascii=False, indent=1), encoding="utf-8")
    return [out / "model.safetensors", *(out / name for name in files)]


def hf_weights(model: GPT) -> dict[str, Tensor]:
    found = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.positions.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
    }
    if not model.shape.is_tied:
        found["lm_head.weight"] = model.head.weight
    for number, block in enumerate(model.blocks):
        for own, theirs in BLOCK.items():
            part = getattr(block, own)
            name = f"transformer.h.{number}.{theirs}"
            found[f"{name}.weight"] = part.weight.t() if own in TURNED else part.weight
            found[f"{name}.bias"] = part.bias
    return {name: tensor.detach() for name, tensor in found.items()}


def hf_config(shape: GPTShape, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
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
        "bos_token_id": tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        "torch_dtype": dtype.removeprefix("torch."),
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The tokenizer's own file; for plain bytes one that gives the same ids, 256 being the end of a document."""
    return tokenizer.json if tokenizer.json is not None else json.dumps(byte_tokenizer())

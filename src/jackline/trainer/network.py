"""Which network a config means, and what is asked of each: its shape, words, arithmetic, module and kernels.

Two there are: GPT, and the one with sparse attention (models/nsa). Owns that nobody else has to tell them apart.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jackline.memory.plan.gpus import Precision
from jackline.models import shapes
from jackline.models.gpt import GPT
from jackline.models.loss import why_no_kernel
from jackline.models.nsa import shape as nsa
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSA_SHAPES, NSAShape
from jackline.models.shapes import GPTShape
from jackline.trainer.config import TrainConfig

Shape = GPTShape | NSAShape
Network = GPT | NSAModel
# What autocast computes in; else the weights' own type.
CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shape_of(config: TrainConfig, vocab_size: int) -> Shape:
    """`vocab_size` is the tokenizer's own."""
    wanted = config.vocab_size or -(-vocab_size // config.VOCAB_MULTIPLE) * config.VOCAB_MULTIPLE
    if config.shape_name in NSA_SHAPES:
        # With auto it is `config.settle_shape` that decides, on the device.
        return replace(NSA_SHAPES[config.shape_name], vocab_size=wanted, is_dense=str(config.attention) == "dense")
    found = shapes.find_shape(config.shape_name)
    return replace(found, context=config.seq_len, vocab_size=wanted, dropout=config.dropout)


def make_model(shape: Shape, *, is_recomputing: bool, loss_chunk_rows: int) -> Network:
    if isinstance(shape, NSAShape):
        return NSAModel(shape, is_recomputing=is_recomputing, loss_chunk_rows=loss_chunk_rows)
    return GPT(shape, is_recomputing=is_recomputing, loss_chunk_rows=loss_chunk_rows)


def count_parameters(shape: Shape) -> int:
    return nsa.count_parameters(shape) if isinstance(shape, NSAShape) else shapes.count_parameters(shape)


def describe_shape(name: str, shape: Shape) -> str:
    """'small: 12 x 768, 12 heads, context 1024, 124,439,808 parameters, head tied to the embedding'."""
    if isinstance(shape, GPTShape):
        return shapes.describe_shape(name, shape)
    begin = (
        f"{name}: {shape.num_layers} x {shape.width}, {shape.num_heads} heads in {shape.num_groups} groups, "
        f"{nsa.count_parameters(shape):,} parameters"
    )
    if shape.is_dense:
        return f"{begin}; a token reads every token before it"
    return (
        f"{begin}; a token reads compressed blocks of "
        f"{shape.compressed_length}, {shape.num_blocks} chosen ones of {shape.block_length} and the last "
        f"{shape.window} tokens"
    )


def context_of(shape: Shape) -> int | None:
    """The longest sequence it can take; None: any, its positions are turned and not looked up."""
    return shape.context if isinstance(shape, GPTShape) else None


def use_kernels(model: Network, precision: Precision) -> str:
    """Our own kernels where they are verified on this GPU, before it is compiled; a sentence about it, or nothing."""
    model.has_loss_kernel = precision == "bf16-weights" and not why_no_kernel(model.head)
    if isinstance(model, GPT) and precision == "bf16-weights":
        model.use_kernels()
    if not isinstance(model, NSAModel) or model.shape.is_dense:
        return ""
    why_not = model.use_kernels(CAST.get(precision))
    if why_not:
        return f"attention in plain torch, with memory for the square of the sequence; no kernels: {why_not}"
    return "attention by our own kernels: compared with plain torch on this GPU, outputs, gradients and chosen blocks"

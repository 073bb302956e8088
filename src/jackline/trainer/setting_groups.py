"""The settings of every training, declared group by group.

Owns each field: type, default, unit, meaning, range. `TrainConfig` (config.py) puts the groups together into one flat
config and owns the rules between fields. A group has at most 12 fields; a test holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jackline.settings import FRACTION, above, at_least, between, setting


@dataclass(frozen=True)
class ModelSettings:
    GROUP: ClassVar[str] = "model"

    model: Literal["nano", "tiny", "small", "medium", "xl"] = setting("small", "Size of the model.")
    seq_len: int = setting(1024, "Length of a sequence.", unit="tokens", allowed=at_least(1))
    vocab_size: int = setting(
        0,
        "Rows of the embedding, a multiple of 8; 0: the tokenizer's, rounded up to a multiple of 64.",
        unit="tokens",
        allowed=at_least(0),
    )
    dropout: float = setting(0.0, "Share of activations set to zero while training.", allowed=FRACTION)
    packing: Literal["joined", "separate"] = setting(
        "joined",
        "What a token reads of its sequence; joined: all before it; separate: its own document alone.",
    )


@dataclass(frozen=True)
class DataSettings:
    GROUP: ClassVar[str] = "data"

    data: str = setting(
        "", "Where the text is: a path, folder, glob, http(s):// or hf:// address; several: a.txt@0.7,b.txt@0.3."
    )
    text_column: str = setting("", "Column or key that holds the text; empty: found by its name.")
    documents: Literal["file", "line", "block"] = setting(
        "file", "What is one document in a text file; block: a paragraph."
    )
    tokenizer: str = setting("gpt2", "gpt2, bytes, or the path of a tokenizer.json.")
    val_fraction: float = setting(
        0.01, "Share of the documents kept for validation, chosen by their contents; 0: none.", allowed=FRACTION
    )
    val_tokens: int = setting(
        10_000_000, "Most tokens of the validation set; 0: no limit.", unit="tokens", allowed=at_least(0)
    )
    min_chars: int = setting(0, "Shorter documents are skipped.", unit="characters", allowed=between(0, 65536))
    max_train_examples: int = setting(0, "Most documents to train on; 0: all.", unit="documents", allowed=at_least(0))
    max_val_examples: int = setting(
        0, "Most documents to validate on; 0: all.", unit="documents", allowed=at_least(0)
    )
    max_cache_bytes: int = setting(
        0, "Most disk space for tokenised text; 0: no limit.", unit="bytes", allowed=at_least(0)
    )
    data_dir: str = setting("", "Folder of the data cache; empty: $JACKLINE_DATA or the user's cache folder.")
    num_threads: int = setting(
        1, "Threads that read batches ahead; 0: the training thread reads them itself.", allowed=at_least(0)
    )


@dataclass(frozen=True)
class SourceSettings:
    GROUP: ClassVar[str] = "source files"

    encoding: str = setting("auto", "Encoding of text files, such as utf-8, cp1252, utf-16-le; auto: recognised.")
    split_by: Literal["auto", "document", "lines"] = setting(
        "auto",
        "lines: a text file is divided between the splits; document: it is not; auto: if it is the only one.",
    )
    max_damaged: float = setting(0.01, "Share of text and documents that may be unreadable.", allowed=between(0, 1))


@dataclass(frozen=True)
class LengthSettings:
    GROUP: ClassVar[str] = "length and batch"

    batch_size: int = setting(
        32, "Sequences in one optimizer step, however much memory there is.", unit="sequences", allowed=at_least(1)
    )
    micro_batch: int = setting(
        0, "Sequences in memory at a time; 0: planned from the memory.", unit="sequences", allowed=at_least(0)
    )
    max_steps: int = setting(1000, "Optimizer steps of the whole training.", unit="steps", allowed=at_least(1))
    epochs: int = setting(
        0, "Passes over the data, which must be on disk as a whole; 0: max_steps decides.", allowed=at_least(0)
    )
    patience: int = setting(
        0, "End after so many quick validations without a gain; 0: never.", unit="validations", allowed=at_least(0)
    )
    min_gain: float = setting(0.0, "Smallest difference of the metric that counts as a gain.", allowed=at_least(0))
    time_limit_s: float = setting(
        0.0, "Save and stop after this time; 0: no limit.", unit="seconds", allowed=at_least(0)
    )


@dataclass(frozen=True)
class FineTuneSettings:
    GROUP: ClassVar[str] = "fine-tuning"

    init_from: str = setting(
        "", "Weights to begin with: a run, a checkpoint, a .safetensors file, or a folder of transformers."
    )
    init_partial: bool = setting(
        False, "What init_from lacks, or has in another shape, keeps its initial values; said which."
    )
    frozen: str = setting(
        "", "Parameters that are not trained: names or patterns, with commas between them: tokens.*,blocks.0.*."
    )
    chat: bool = setting(False, "The data are conversations in JSONL; the loss is over their answers alone.")


@dataclass(frozen=True)
class SmoothingSettings:
    GROUP: ClassVar[str] = "averaging and smoothing"

    ema: float = setting(
        0.0,
        "Decay of a moving average of the weights, which is then validated and exported; 0: none.",
        allowed=FRACTION,
    )
    label_smoothing: float = setting(
        0.0, "Share of each target that is spread over all tokens while training.", allowed=FRACTION
    )


@dataclass(frozen=True)
class OptimizerSettings:
    GROUP: ClassVar[str] = "optimizer"

    optimizer: Literal["adamw", "lion", "adafactor", "muon", "adamw8bit"] = setting(
        "adamw",
        "Rule of the update; muon: for matrices inside the model, AdamW for the rest; adamw8bit: needs bitsandbytes.",
    )
    lr: float = setting(6e-4, "Highest learning rate of the schedule.", allowed=above(0))
    min_lr: float = setting(6e-5, "Learning rate at the end of the schedule.", allowed=at_least(0))
    warmup_steps: int = setting(
        100,
        "Steps in which the learning rate rises from 0 to lr; 0: none, for one-cycle 30 % of all.",
        unit="steps",
        allowed=at_least(0),
    )
    schedule: Literal["cosine", "constant", "wsd", "one-cycle"] = setting(
        "cosine",
        "Course of the learning rate after warm-up; wsd: constant, then linear decay; one-cycle: up, then down.",
    )
    decay_steps: int = setting(
        0,
        "Steps of the decay; 0: all after warm-up for cosine, the last tenth for wsd.",
        unit="steps",
        allowed=at_least(0),
    )
    schedule_start: int = setting(
        0,
        "Step at which the schedule begins anew, warm-up included; 0: it is that of the whole run.",
        unit="steps",
        allowed=at_least(0),
    )
    weight_decay: float = setting(0.1, "Decoupled weight decay.", allowed=at_least(0))
    beta1: float = setting(0.9, "Decay of the first moment; muon: its momentum is 0.95.", allowed=FRACTION)
    beta2: float = setting(0.95, "Decay of the second moment; lion: of the first.", allowed=FRACTION)
    clip: float = setting(1.0, "Largest norm of the gradient; 0: no clipping.", allowed=at_least(0))
    clip_by: Literal["norm", "value"] = setting(
        "norm", "norm: all gradients are scaled by one factor; value: each number is cut to between -clip and clip."
    )


@dataclass(frozen=True)
class ComputeSettings:
    GROUP: ClassVar[str] = "compute"

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where to compute; auto: a GPU if there is one.")
    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16-weights"] = setting(
        "auto", "dtype of the computation; bf16-weights: bf16 weights with float32 masters."
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto", "Use torch.compile; auto: if the remaining steps gain more than compiling costs."
    )
    compile_cache: Literal["shared", "run"] = setting(
        "shared", "Start with what an earlier run of the same model compiled; run: this run's own code alone."
    )
    attention: Literal["auto", "cudnn", "flash", "plain"] = setting(
        "auto", "Attention kernel on a GPU; auto: by the GPU's generation."
    )
    loss_chunk_rows: int = setting(
        0, "Compute the loss for this many tokens at a time, to save memory; 0: all at once.", allowed=at_least(0)
    )
    recompute: bool = setting(False, "Recompute activations in the backward pass: less memory, more time.")
    exact: bool = setting(False, "Resume bit-exactly on a GPU too: deterministic kernels, no autotuning.")
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp", "With several ranks (--nproc): all weights on each, or weights divided over the ranks (fsdp)."
    )
    max_gpu_bytes: int = setting(
        0, "Most of the GPU's memory that this training takes; 0: what is free.", unit="bytes", allowed=at_least(0)
    )
    rehearse: bool = setting(True, "Measure one step and undo it before the first one.")
    seed: int = setting(0, "Seed of weights, data order and dropout.", allowed=at_least(0))


@dataclass(frozen=True)
class ValidationSettings:
    GROUP: ClassVar[str] = "validation"

    eval_every: int = setting(
        200, "Steps between validations; 0: none on the way.", unit="steps", allowed=at_least(0)
    )
    eval_share: float = setting(
        0.1, "Share of the validation set that a validation on the way reads.", allowed=between(0, 1)
    )
    full_eval: bool = setting(True, "Validate on the whole validation set at the end.")
    metric: Literal["val_loss"] = setting("val_loss", "Number that decides which checkpoint is the best.")


@dataclass(frozen=True)
class CheckpointSettings:
    GROUP: ClassVar[str] = "checkpoints"

    save_every_steps: int = setting(
        0, "Steps between checkpoints; 0: by save_every_s.", unit="steps", allowed=at_least(0)
    )
    save_every_s: float = setting(
        0.0,
        "Time between checkpoints; both 0: as often as costs under 0.5 % of the time.",
        unit="seconds",
        allowed=at_least(0),
    )
    keep_last: int = setting(3, "Newest checkpoints to keep; two are kept in any case.", allowed=at_least(1))
    keep_every: int = setting(
        0, "Keep checkpoints of steps that are multiples of this; 0: none.", unit="steps", allowed=at_least(0)
    )
    mirror: str = setting("", "Second place for checkpoints: a folder or URL.")
    disk_budget: int = setting(
        0,
        "Most disk space for this run's folder: checkpoints, logs, caches; 0: no limit.",
        unit="bytes",
        allowed=at_least(0),
    )
    wait_for_disk_s: float = setting(
        600.0,
        "How long a run that is done waits when the disk refuses its last save; then it exits with 75, resumable.",
        unit="seconds",
        allowed=at_least(0),
    )
    mirror_patience_s: float = setting(
        600.0,
        "How long a finished run waits for its last upload while no byte moves; then it ends and can be resumed.",
        unit="seconds",
        allowed=at_least(0),
    )


@dataclass(frozen=True)
class RunSettings:
    GROUP: ClassVar[str] = "run"

    recipe: str = setting("", "Name of the recipe: the word behind `train`; cannot be set.")
    quick: bool = setting(False, "Tiny settings to see that everything works, in under a minute.")
    log_every: int = setting(
        0,
        "Steps between lines; a line comes every 1.5 s in any case.",
        unit="steps",
        allowed=at_least(0),
    )
    verbose: bool = setting(False, "Print every step, with the windows of its batch.")
    sentinels: Literal["warn", "stop", "off"] = setting(
        "warn", "What alarms for impossible numbers do; stop: a fatal one ends the run; off: nothing is watched."
    )
    replay_every: int = setting(
        0,
        "Do a step again every so many steps, and when its loss is strange, to tell machine from data; 0: never.",
        unit="steps",
        allowed=at_least(0),
    )
    on_spike: Literal["continue", "rewind"] = setting(
        "continue",
        "After a jump of the loss: rewind goes back and leaves those batches out, at most three times.",
    )

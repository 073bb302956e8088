"""M7C: a language model with Native Sparse Attention on FineWeb-Edu, called 125M where it comes from.

Owns the recipe's settings, the names its forerunner had for them, and what of its environment is no longer read.
The model is models/nsa, what is measured while it trains is method.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jackline.errors import UsageError
from jackline.models.nsa.shape import NSA_SHAPES
from jackline.settings import at_least, between, setting
from jackline.trainer.config import TrainConfig, resolve_words

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from jackline.memory.plan.gpus import GpuModel, Precision
    from jackline.memory.plan.target import Candidate
    from jackline.recipes.m7c.method import AttentionStatistics
    from jackline.trainer.network import Shape
    from jackline.trainer.report.console import Console
from collections.abc import Iterator

PREFIX = "NSA_"
_ONE_ROAD = "nothing to choose: kernels where they are verified on this GPU, plain torch elsewhere, tested equal"
_EXCHANGED = "ranks add up gradients once a step, in a fixed order: `jackline train m7c --nproc 2`"
_SCALER = "torch's own growth; --precision bf16 or auto needs no scaler"
_WATCHED = "always on, at no cost for a step"
_READ_AHEAD = "data is read and tokenised ahead by a process of its own"
_FINDS = "`jackline why RUN` shows where every thread stands; sentinels name the first bad tensor"

OLD_ENVIRONMENT: Mapping[str, str] = {
    "CONFIG": "--config FILE",
    "NSA_SEQ_LEN": "--seq-len N",
    "NSA_BATCH_SIZE": "--batch-size N",
    "NSA_ACCUM": "--batch-size N --accum-batches N",
    "NSA_LR": "--lr X",
    "NSA_NO_GC": "--recompute no, as it is unless asked for",
    "NSA_OPT_FUSED": "the fused update is taken where there is one",
    "NSA_DETECT_ANOMALY": _FINDS,
    "NSA_MEM_DUMP_EVERY": "`jackline plan m7c --explain` says where memory goes",
    "NSA_TB_DISABLE": "curves cost a tenth of a millisecond a step and are always drawn, into RUN/tb",
    "NSA_DISABLE_CSV_LOGS": "numbers are in RUN/metrics-0.jsonl",
    "NSA_HEARTBEAT_EVERY": _WATCHED,
    "NSA_LOG_GRAD_NORM": _WATCHED,
    "NSA_DISABLE_AUX_STATS": "--stats-every 0",
    "NSA_DEBUG_LOSS": _FINDS,
    "NSA_TRACE_GRADS": _FINDS,
    "NSA_TRACE_MODULE_BWD": _FINDS,
    "NSA_TRACE_DDP_BUCKETS": _EXCHANGED,
    "NSA_PG_TIMEOUT_MIN": "a rank that does not arrive is named within half a minute",
    "TORCH_BACKEND": "NCCL on NVIDIA GPUs, gloo elsewhere",
    "NSA_STOPGRAD_GATES": "gates are always learnt",
    "NSA_ROPE_SCALE": "positions are turned by their own number",
    "NSA_STRICT_ASSERTS": "shapes and settings are checked before the first step",
}
# The rest of them by how their names begin.
_FAMILIES = (
    ("NSA_SCALER_", _SCALER),
    ("NSA_DDP_", _EXCHANGED),
    ("NSA_FWE_", _READ_AHEAD),
    ("NSA_GC_", "--recompute yes recomputes every layer"),
    ("NSA_", _ONE_ROAD),
)


def unread_lines(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set and was read once."""
    for name in sorted(environ):
        if name in OLD_ENVIRONMENT or name.startswith(PREFIX):
            meant = OLD_ENVIRONMENT.get(name) or next(text for begin, text in _FAMILIES if name.startswith(begin))
            yield f"${name}={environ[name]} is not read: {meant}"


# A random sample over all crawls; 50,000 steps of the large model read a twelfth of it.
FINEWEB_EDU = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet"
_DATASETS = ("fineweb_edu", "fineweb_edu_local")
_SHAPE_NAMES = {"125m": "m7c", "smoke": "m7c-smoke", "toy": "m7c-showcase"}
_ROOM_ON_CPU = 1 << 30  # bytes of scores, in all layers
_RESUME = "the same command again resumes from the newest good checkpoint; so does `jackline resume`"
_SAVED = (
    "a run keeps its checkpoints: --runs-dir DIR says where, `jackline checkpoints export RUN` takes the weights out"
)
_SUBSTITUTE = (
    "data that cannot be loaded is an error and never replaced by noise; `jackline doctor m7c` tries it first"
)
_PATIENCE = (
    "a source is waited for 45 s before the first batch and 15 min later, with a word every 2 s; "
    "`jackline doctor m7c` tries it for 20 s"
)


@dataclass(frozen=True)
class M7cConfig(TrainConfig):
    """`batch_size` is the sequences of an update. What came as so many batches to accumulate is multiplied out."""

    GROUP: ClassVar[str] = "m7c"

    model: Literal["125m", "smoke", "toy"] = "125m"  # type: ignore[assignment]
    data: str = FINEWEB_EDU
    val_tokens: int = 1_000_000
    batch_size: int = 16
    max_steps: int = 50_000
    lr: float = 2e-4
    min_lr: float = 2e-5
    warmup_steps: int = 2000
    weight_decay: float = 0.01
    beta2: float = 0.999
    seed: int = 1337
    eval_every: int = 500
    log_every: int = 5

    attention: Literal["auto", "sparse", "dense"] = setting(  # type: ignore[assignment]
        "auto", "Sparse or dense attention, two different models; auto: the faster one, measured on the GPU."
    )
    dataset: str = setting(
        "", "fineweb_edu (from the hub) or fineweb_edu_local (at local_path); empty: data decides."
    )
    local_path: str = setting("", "Folder, file or glob of fineweb_edu_local.")
    accum_batches: int = setting(0, "Multiplies batch_size; 0: batch_size is the whole batch.", allowed=at_least(0))
    no_gc: bool = setting(False, "Compute nothing twice, which is the default; contradicts recompute.")
    ddp: int = setting(
        -1,
        "1: refuse to train with one process; 0: refuse several ranks (--nproc); -1: either.",
        allowed=between(-1, 1),
    )
    stats_every: int = setting(
        50,
        "Steps between statistics of gates and selection, each a forward pass over one sequence; 0: never.",
        unit="steps",
        allowed=at_least(0),
    )

    ALIASES: ClassVar[Mapping[str, str]] = {
        **TrainConfig.ALIASES,
        "steps": "max_steps",
        "gradient_checkpointing": "recompute",
    }
    REPLACED: ClassVar[Mapping[str, str]] = {
        **TrainConfig.REPLACED,
        "save": _SAVED,
        "resume": _RESUME,
        "synthetic_on_fail": _SUBSTITUTE,
        "loader_timeout": _PATIENCE,
        "fwe_report_docs": "documents, tokens and their rate are told at least every 2 s while data is read",
    }
    UNUSED: ClassVar[frozenset[str]] = frozenset({"packing"})  # sparse attention has no such mask
    QUICK: ClassVar[Mapping[str, Any]] = {
        "model": "toy",
        "seq_len": 128,
        "stats_every": 10,
        "log_every": 0,
        # A file's data and batch under their older names are not those of a quick trial either.
        "dataset": "",
        "local_path": "",
        "accum_batches": 0,
    }
    ALIKE: ClassVar[Mapping[str, Mapping[Any, Any]]] = {"ddp": {0: -1, 1: -1}}  # a check, not a part of the training
    SMALLEST: ClassVar[str] = "toy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout:
            raise UsageError(f"dropout={self.dropout}: this model has none", hint="weight_decay is what it has")

    def check_ranks(self, size: int) -> None:
        if self.ddp == 1 and size == 1:
            raise UsageError(
                "ddp=1, but this is one process", hint="add --nproc 2 (one rank for each GPU), or --ddp 0"
            )
        if self.ddp == 0 and size > 1:
            raise UsageError(f"ddp=0, but there are {size} ranks", hint="leave out --nproc, or --ddp 1")

    @property
    def shape_name(self) -> str:
        return _SHAPE_NAMES[self.model]

    @property
    def cpu_micro_batch(self) -> int:
        """Plain attention holds its scores, the square of the sequence for each head, layer and branch."""
        shape = NSA_SHAPES[self.shape_name]
        scores = shape.num_layers * shape.num_heads * self.seq_len * (2 * self.seq_len)
        copies = 4  # before and after masking, their shares, and one on the way back
        return max(1, min(self.batch_size, _ROOM_ON_CPU // (4 * copies * scores)))

    def unread_environment(self, environ: Mapping[str, str]) -> Iterable[str]:
        return unread_lines(environ)

    def settle_shape(self, shape: Shape, place: tuple[Precision, torch.device, Path], console: Console) -> Shape:
        import torch

        from jackline.models.nsa.shape import NSAShape
        from jackline.trainer.startup.attention_kind import choose_kind

        assert isinstance(shape, NSAShape)
        precision, device, folder = place
        dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
        with console.during("comparing sparse with dense attention on this device"):
            found, words = choose_kind(self.attention, shape, self.seq_len, dtype=dtype, device=device, folder=folder)
        console.say(words, "model")
        return found

    def make_additions(self, model: nn.Module) -> AttentionStatistics:
        from jackline.recipes.m7c.method import AttentionStatistics

        return AttentionStatistics(self.stats_every)

    def settle(self, origins: Mapping[str, str]) -> M7cConfig:
        """The forerunner's names become ours: where the data is, how large a batch, recomputed or not."""
        made = _with_data(self, origins)
        if self.accum_batches:
            # A size from the same place was meant as one of so many, and so is one that is typed over a file's.
            is_beside = origins.get("batch_size") in (origins.get("accum_batches"), "command line")
            each = self.batch_size if is_beside else 1
            made = replace(made, batch_size=each * self.accum_batches, accum_batches=0)
        if self.no_gc and self.recompute:
            wins = _later(origins, "no_gc", "recompute")
            if not wins:
                raise UsageError(
                    "no_gc says that nothing is computed twice, recompute that it is", hint="give one of the two"
                )
            made = replace(made, no_gc=wins == "no_gc", recompute=wins == "recompute")
        return made


def _later(origins: Mapping[str, str], one: str, other: str) -> str:
    """Which of two settings that contradict each other was typed, where the other is a file's; '' when neither."""
    is_typed = [name for name in (one, other) if origins.get(name) == "command line"]
    return is_typed[0] if len(is_typed) == 1 else ""


def _with_data(config: M7cConfig, origins: Mapping[str, str]) -> M7cConfig:
    """What `dataset` and `local_path` mean as a source."""
    if config.dataset == "synthetic":
        raise UsageError(
            "dataset=synthetic: nothing can be learnt from noise, and nothing is trained on it here",
            hint="--quick trains a tiny model on real text that every machine has; --data SOURCE on your own",
        )
    if config.dataset not in ("", *_DATASETS):
        raise UsageError(
            f"dataset is one of {', '.join(_DATASETS)}, not '{config.dataset}'",
            hint="--dataset fineweb_edu; any other source: --data SOURCE",
        )
    if config.dataset == "fineweb_edu" and config.local_path:
        wins = _later(origins, "dataset", "local_path")
        if not wins:
            raise UsageError(
                f"dataset=fineweb_edu is read from the hub, local_path={config.local_path} is not",
                hint="--dataset fineweb_edu_local --local-path PATH",
            )
        is_hub = wins == "dataset"
        config = replace(config, local_path="") if is_hub else replace(config, dataset="fineweb_edu_local")
    if config.dataset == "fineweb_edu_local" and not config.local_path:
        raise UsageError(
            "dataset=fineweb_edu_local does not say where it lies",
            hint="--local-path FOLDER with *.parquet, or a file or glob",
        )
    named = "local_path" if config.local_path else "dataset" if config.dataset else ""
    wanted = config.local_path or (FINEWEB_EDU if config.dataset else config.data)
    if origins.get("data") in ("recipe", "quick") or config.data == wanted:
        return replace(config, data=wanted)
    wins = _later(origins, named, "data")
    if not wins:
        raise UsageError(f"data={config.data} and {wanted} are both asked for", hint="--data SOURCE alone is enough")
    return replace(config, dataset="", local_path="") if wins == "data" else replace(config, data=wanted)


def recipe() -> M7cConfig:
    return M7cConfig()


def candidates(gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """For `jackline plan m7c`."""
    from jackline.trainer.planning.plan import candidate_of

    return (candidate_of(resolve_words("m7c", words).config, gpu),)

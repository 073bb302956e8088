"""SlimPajama: a GPT trained on a stream of jsonl.zst, chunk by chunk: accumulate tokens, one step, next chunk.

Owns the recipe's settings and the names that its forerunner had for them. What a chunk is, is chunks.py; reading is
the data engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jackline.errors import UsageError
from jackline.settings import at_least, setting
from jackline.trainer.config import TrainConfig, resolve_words

if TYPE_CHECKING:
    from torch import nn

    from jackline.memory.plan.gpus import GpuModel
    from jackline.memory.plan.target import Candidate
    from jackline.recipes.slimpajama.chunks import ChunkSource
    from jackline.recipes.slimpajama.method import ChunkAdditions
    from jackline.trainer.report.console import Console

SLIMPAJAMA = "hf://datasets/cerebras/SlimPajama-627B/train/**/*.jsonl.zst"
SLIMPAJAMA_TOKENS = 627_000_000_000
_TEST: Mapping[str, Any] = {"max_steps": 5, "tokens_per_chunk": 1024, "seq_len": 256, "warmup_steps": 0}
_NO_VALIDATION = ("val_fraction", "val_tokens", "max_val_examples", "eval_every", "eval_share", "full_eval")
_CHECKPOINTS = "saving takes milliseconds and is what a run resumes from; --keep-last 1 keeps the fewest"
_PICTURES = "curves are drawn as the run goes: tensorboard --logdir RUN/tb; all numbers are in metrics-0.jsonl"
_SIZE = "--model_size nano, tiny, small or medium decides width and depth"
_STREAM = "documents are always streamed; --data SOURCE says from where"


@dataclass(frozen=True)
class SlimpajamaConfig(TrainConfig):
    """`batch_size` follows: as many sequences as a chunk has room for, so that a chunk is a step."""

    GROUP: ClassVar[str] = "stream"

    model: Literal["nano", "tiny", "small", "medium", "xl"] = "tiny"
    seq_len: int = 512
    data: str = SLIMPAJAMA
    val_fraction: float = 0.0
    eval_every: int = 0
    full_eval: bool = False
    batch_size: int = setting(8, "Sequences in one step; follows from tokens_per_chunk and seq_len.")
    max_steps: int = -(-SLIMPAJAMA_TOKENS // 4096)
    epochs: int = setting(1, "How often the stream is read from its beginning.")
    lr: float = 3e-4
    min_lr: float = 3e-4
    warmup_steps: int = 100
    schedule: Literal["cosine", "constant", "wsd"] = "constant"

    tokens_per_chunk: int = setting(
        4096, "Tokens of one step, rounded up to whole sequences.", unit="tokens", allowed=at_least(1)
    )
    test: bool = setting(False, "Five chunks of 1,024 tokens, in sequences of 256, from the same source.")
    gpu: int = setting(0, "Only 0; CUDA_VISIBLE_DEVICES chooses another GPU.", allowed=at_least(0))
    pretrained_checkpoint: str = setting("", "Start with the weights of this checkpoint folder of another run.")

    ALIASES: ClassVar[Mapping[str, str]] = {
        **TrainConfig.ALIASES,
        "max_chunks": "max_steps",
        "steps": "max_steps",
        "num_epochs": "epochs",
        "vocab": "vocab_size",
    }
    REPLACED: ClassVar[Mapping[str, str]] = {
        **TrainConfig.REPLACED,
        "no_checkpoint": _CHECKPOINTS,
        "save_checkpoint": _CHECKPOINTS,
        "embedding_dim": _SIZE,
        "temperature": "nothing is generated while training",
        "dataset_name": "--data hf://datasets/OWNER/NAME/**/*.jsonl.zst, http(s)://..., a folder, a file or a glob",
        "dataset_split": f"the path names it: --data '{SLIMPAJAMA}'",
        "dataset_streaming": _STREAM,
        "streaming": _STREAM,
        "log_dir": "everything of a run lies in its folder: --runs-dir DIR",
        "statistics_interval": "every line has them; --log_interval N asks for more lines",
        "viz_dir": _PICTURES,
        "viz_interval": _PICTURES,
        "viz_interval_chunks": _PICTURES,
        "save_samples_every": _PICTURES,
        "tokenizer_dir": "--tokenizer gpt2, bytes, or the path of a tokenizer.json",
        "tokenizer_model": "--tokenizer gpt2, bytes, or the path of a tokenizer.json",
        "intensive": "there is no stage of its own for embeddings: they are learned with the rest",
    }
    # Chunks are not packed, and nothing is validated. pretrained_checkpoint has the place of init_from.
    UNUSED: ClassVar[frozenset[str]] = frozenset(
        {"packing", "patience", "min_gain", "init_from", "init_partial", "chat"}
    )
    QUICK: ClassVar[Mapping[str, Any]] = {
        "val_fraction": 0.0,
        "val_tokens": TrainConfig.val_tokens,
        "eval_every": 0,
        "tokens_per_chunk": 512,
        "epochs": 1,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpu:
            raise UsageError(
                f"gpu={self.gpu} is not chosen here",
                hint=f"CUDA_VISIBLE_DEVICES={self.gpu} jackline train slimpajama",
            )

    @property
    def has_known_end(self) -> bool:
        """How long the hub's data set is, is known; of other data only the limit, if there is one."""
        return self.data == SLIMPAJAMA or self.max_steps != self._whole_steps()

    def _whole_steps(self) -> int:
        return -(-SLIMPAJAMA_TOKENS // (self.batch_size * self.seq_len))

    def open_text(self, console: Console) -> ChunkSource:
        """Documents as they arrive; nothing is cached."""
        from jackline.recipes.slimpajama.chunks import open_chunks
        from jackline.trainer.corpus import spec_of

        return open_chunks(spec_of(self, "train"), console)

    def make_additions(self, model: nn.Module) -> ChunkAdditions:
        from jackline.recipes.slimpajama.method import ChunkAdditions, load_weights

        if self.pretrained_checkpoint:
            load_weights(model, Path(self.pretrained_checkpoint).expanduser())
        return ChunkAdditions()

    def settle(self, origins: Mapping[str, str]) -> SlimpajamaConfig:
        """What nobody asked for: --test's sizes, the sequences of a chunk, as many chunks as the data has."""
        is_asked = {name for name, who in origins.items() if who not in ("recipe", "quick", "a tenth of max_steps")}
        _check_settings(self, is_asked)
        made = self
        if self.test:
            sizes: dict[str, Any] = {name: value for name, value in _TEST.items() if name not in is_asked}
            made = replace(made, **sizes)
        num_sequences = -(-made.tokens_per_chunk // made.seq_len)
        if "batch_size" in is_asked and made.batch_size != num_sequences:
            raise UsageError(
                f"batch_size={made.batch_size} is not what a chunk of {made.tokens_per_chunk:,} tokens holds:"
                f" {num_sequences} sequences of {made.seq_len}",
                hint=f"--tokens_per_chunk {made.batch_size * made.seq_len} makes a step of that batch",
            )
        made = replace(made, batch_size=num_sequences)
        if "max_steps" not in is_asked and not self.test and not self.quick:
            made = replace(made, max_steps=made._whole_steps())
        return made


def _check_settings(config: SlimpajamaConfig, is_asked: set[str]) -> None:
    """What would be accepted and then ignored."""
    plain = SlimpajamaConfig()
    changed = {name for name in is_asked if getattr(config, name) != getattr(plain, name)}
    for name in _NO_VALIDATION:
        if name in changed:
            raise UsageError(
                f"{name}={getattr(config, name)}: a stream that is read once has no validation set",
                hint="the loss of a chunk is of text not seen before; recipe 'demo' with --data SOURCE validates",
            )
    if "max_cache_bytes" in changed:
        raise UsageError("max_cache_bytes: a stream has no cache", hint="recipe 'demo' with --data SOURCE has one")


def recipe() -> SlimpajamaConfig:
    return SlimpajamaConfig()


def candidates(gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """For `jackline plan slimpajama`."""
    from jackline.trainer.planning.plan import candidate_of

    return (candidate_of(resolve_words("slimpajama", words).config, gpu),)

"""What a training is: one flat, typed, resolved config, and where each of its values came from.

Owns the rules between fields, the order in which recipe, file, --quick and command line have their say, and
config.yaml of a run. The fields are declared in setting_groups.py. No torch here: the command line resolves configs
too. What a plan chooses is not written here; `0` and `auto` mean that it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from jackline.errors import UsageError
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.settings import validate
from jackline.trainer.overrides import find_settings_file, read_words, read_yaml
from jackline.trainer.recipe import RecipeHooks, load_recipe
from jackline.trainer.setting_groups import (
    CheckpointSettings,
    ComputeSettings,
    DataSettings,
    FineTuneSettings,
    LengthSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    SmoothingSettings,
    SourceSettings,
    ValidationSettings,
)

QUIET_FIELDS = (
    "verbose",
    "time_limit_s",
    "mirror",
    "mirror_patience_s",
    "num_threads",
    "log_every",
    "stats_every",
    "keep_last",
    "keep_every",
    "disk_budget",
    "wait_for_disk_s",
    "data_dir",
    "max_damaged",
    "parallel",
    "replay_every",
    "max_gpu_bytes",
)
A_TENTH = "a tenth of max_steps"  # where a warm-up comes from that was too long
# Settings that came later. While they have these values a training is what it was without them, and so is its name.
LATER_FIELDS: Mapping[str, Any] = {
    "encoding": "auto",
    "split_by": "auto",
    "schedule_start": 0,
    "optimizer": "adamw",
    "clip_by": "norm",
    "patience": 0,
    "min_gain": 0.0,
    "packing": "joined",
    "init_from": "",
    "init_partial": False,
    "frozen": "",
    "chat": False,
    "ema": 0.0,
    "label_smoothing": 0.0,
    "on_spike": "continue",
}


@dataclass(frozen=True)
class TrainConfig(
    RunSettings,
    CheckpointSettings,
    ValidationSettings,
    ComputeSettings,
    SmoothingSettings,
    FineTuneSettings,
    OptimizerSettings,
    LengthSettings,
    SourceSettings,
    DataSettings,
    ModelSettings,
    RecipeHooks,
):
    """Everything a training depends on, and how it is watched: the groups of settings in one flat config.

    Dataclasses collect fields from the last base to the first: `model` comes first, `sentinels` last.
    """

    # The names people know from other trainers.
    ALIASES: ClassVar[Mapping[str, str]] = {
        "learning_rate": "lr",
        "min_learning_rate": "min_lr",
        "model_size": "model",
        "max_seq_length": "seq_len",
        "sequence_length": "seq_len",
        "num_workers": "num_threads",
        "checkpoint_interval": "save_every_steps",
        "save_every_n_batches": "save_every_steps",
        "eval_interval": "eval_every",
        "grad_clip": "clip",
        "max_grad_norm": "clip",
        "optim": "optimizer",
        "early_stopping_patience": "patience",
        "deterministic": "exact",
        "freeze": "frozen",
        "time_limit": "time_limit_s",
        "save_every": "save_every_s",
        "warmup": "warmup_steps",
        "log_interval": "log_every",
    }
    # Names that others have for what is done otherwise here, and how.
    REPLACED: ClassVar[Mapping[str, str]] = {
        "resume_from": "the same command again resumes from the newest good checkpoint; so does `jackline resume`",
        "use_synthetic": "nothing is substituted silently; --data python-stdlib is real text on every machine",
    }
    QUICK: ClassVar[Mapping[str, Any]] = {}  # what a recipe needs otherwise with --quick
    ALIKE: ClassVar[Mapping[str, Mapping[Any, Any]]] = {}  # values of a field that mean the same as another of it
    LEAST_QUICK: ClassVar[int] = 1  # samples of a validation during the training, where there are as many
    UNUSED: ClassVar[frozenset[str]] = frozenset()  # fields that mean nothing to a recipe: neither taken nor shown
    IS_HIGH_GOOD: ClassVar[bool] = False  # of `metric`
    SMALLEST: ClassVar[str] = "nano"  # the size that is of use on a CPU
    VOCAB_MULTIPLE: ClassVar[int] = 64  # rounding up makes the head's products fast

    def __post_init__(self) -> None:
        validate(self)
        for rule in _RULES:
            rule(self)

    @property
    def shape_name(self) -> str:
        """Of models/shapes."""
        return self.model

    @property
    def cpu_micro_batch(self) -> int:
        """Of a CPU, where slices gain nothing unless memory grows with more than the batch."""
        return self.batch_size

    @property
    def is_language(self) -> bool:
        """Whether it is windows of text that are learnt; what is not has neither a size nor a context."""
        return "seq_len" not in self.UNUSED

    @property
    def can_sample(self) -> bool:
        """Whether `jackline sample` can be asked for text."""
        return self.is_language

    @property
    def has_known_end(self) -> bool:
        """Whether `max_steps` says how long it will take; a stream may end before."""
        return True

    def unread_environment(self, environ: Mapping[str, str]) -> Iterable[str]:
        """A line for each variable that is set, was read by the recipe's predecessor, and is not read any more."""
        return ()

    def settle(self, origins: Mapping[str, str]) -> TrainConfig:
        """For recipes in which one setting decides the default of others; `origins` tells what a person set."""
        return self

    def quick_settings(self) -> dict[str, Any]:
        """The same code path in under a minute on two cores. Data that every machine has, and it says so."""
        return {
            "model": "nano",
            "seq_len": min(64, self.seq_len),
            "vocab_size": 0,
            "data": "python-stdlib",
            "text_column": "",
            "tokenizer": "bytes",
            "val_fraction": 0.02,
            "val_tokens": 20_000,
            "batch_size": min(8, self.batch_size),
            "micro_batch": 0,
            "max_steps": min(100, self.max_steps),
            "epochs": 0,
            "lr": 1e-3,
            "min_lr": 1e-4,
            "warmup_steps": 10,
            "decay_steps": 0,
            "eval_every": 50,
            "save_every_steps": 20,
            "compile": "off",
            **self.QUICK,
        }


@dataclass(frozen=True)
class Resolved:
    """A config and, for every field, who set it: recipe, quick, a file's name, command line, or other fields."""

    config: TrainConfig
    origins: Mapping[str, str] = field(default_factory=dict)


def resolve(
    target: str, words: Sequence[str] = (), files: Sequence[Path] = (), source: Path | None = None
) -> Resolved:
    """A recipe's own config, changed by files in their order, then by the words. Where --quick is among the words it
    goes before the files, and every other word before it; where a file says quick, that file's own settings stay.
    `source`: where the file of an own recipe is now, if not at `target`."""
    recipe = load_recipe(target, TrainConfig, source)
    kind = type(recipe)
    origins = {entry.name: "recipe" for entry in fields(kind)}
    values: dict[str, Any] = {}
    for path in files:
        found = read_yaml(kind, path, target)
        origins.update(dict.fromkeys(found, str(path)))
        values.update(found)
    typed = read_words(kind, words, target)
    origins.update(dict.fromkeys(typed, "command line"))
    values.update(typed)
    if values.get("quick", recipe.quick):
        stays = typed if typed.get("quick") else values
        chosen = {name: value for name, value in recipe.quick_settings().items() if name not in stays}
        origins.update(dict.fromkeys(chosen, "quick"))
        values = {**values, **chosen}
    values, origins = _shorten_warmup(recipe, values, origins)
    if values.pop("recipe", target) != target:
        raise UsageError("'recipe' cannot be set", hint=f"the recipe is the word behind train: {target}")
    made = replace(recipe, **values, recipe=target)  # with its name, and so checked for data
    settled = made.settle(origins)
    follows = [entry.name for entry in fields(kind) if getattr(made, entry.name) != getattr(settled, entry.name)]
    return Resolved(settled, {**origins, **dict.fromkeys(follows, "follows from others"), "recipe": "command line"})


def _shorten_warmup(
    recipe: TrainConfig, values: dict[str, Any], origins: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """A short trial (`--max-steps 20`) of a recipe with a long warm-up is no mistake: a tenth of it, and said so."""
    steps = values.get("max_steps", recipe.max_steps)
    # Steps that were typed go before a file's warm-up: that was meant for the file's own.
    is_files = origins["max_steps"] == "command line" != origins["warmup_steps"]
    is_asked_for = origins["warmup_steps"] not in ("recipe", "quick") and not is_files
    if is_asked_for or not 0 < steps <= values.get("warmup_steps", recipe.warmup_steps):
        return values, origins
    warmup = min(steps - 1, steps // 10)
    return {**values, "warmup_steps": warmup}, {**origins, "warmup_steps": A_TENTH}


def resolve_words(target: str, words: Sequence[str]) -> Resolved:
    """As typed: `--config FILE` may stand anywhere among the settings, more than once."""
    files: list[Path] = []
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--config":
            if not waiting:
                raise UsageError("--config needs a file", hint="--config settings.yaml")
            files.append(find_settings_file(waiting.pop(0)))
        elif word.startswith("--config="):
            files.append(find_settings_file(word.removeprefix("--config=")))
        else:
            rest.append(word)
    return resolve(target, rest, files)


def identity(config: TrainConfig) -> dict[str, Any]:
    """What makes two trainings the same run, as plain values; how it is watched and kept is not part of it."""
    found = {
        name: value
        for name, value in asdict(config).items()
        if name not in QUIET_FIELDS and not (name in LATER_FIELDS and value == LATER_FIELDS[name])
    }
    alike = {name: same[found[name]] for name, same in config.ALIKE.items() if found[name] in same}
    return {**found, **alike}


def save_config(run: RunDir, resolved: Resolved) -> None:
    """config.yaml: `jackline train RECIPE --config runs/NAME/config.yaml` starts the same again."""
    atomic.write_whole(run.config_file, config_text(resolved).encode())


def config_text(resolved: Resolved) -> str:
    import yaml

    lines = [f"# {resolved.config.recipe}: resolved settings, each with its origin"]
    for name, value in asdict(resolved.config).items():
        if name in resolved.config.UNUSED:
            continue
        text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
        lines.append(f"{name}: {text}".ljust(43) + f" # {resolved.origins.get(name, 'recipe')}")
    return "\n".join(lines) + "\n"


# Rules between fields, each of one thing a person may get wrong. What a field allows by itself is declared with it.


def _check_rates(config: TrainConfig) -> None:
    if config.min_lr > config.lr:
        raise UsageError(
            f"min_lr={config.min_lr} is above lr={config.lr}", hint="min_lr is the floor the schedule ends at"
        )
    # A recipe's own function may give few steps and leave the warm-up alone: `resolve` shortens it and then checks.
    if (
        config.recipe
        and config.epochs == 0
        and config.schedule != "constant"
        and config.warmup_steps >= config.max_steps
    ):
        raise UsageError(
            f"warmup_steps={config.warmup_steps} takes all of max_steps={config.max_steps}",
            hint="the learning rate would never come down; a tenth is usual",
        )


def _check_batch(config: TrainConfig) -> None:
    if config.micro_batch > config.batch_size:
        raise UsageError(
            f"micro_batch={config.micro_batch} is above batch_size={config.batch_size}",
            hint="batch_size is what one update sees; micro_batch is how much of it is in memory at a time",
        )


def _check_data(config: TrainConfig) -> None:
    if config.recipe and not config.data and "data" not in config.UNUSED:
        raise UsageError(
            f"recipe '{config.recipe}' names no data", hint="--data SOURCE: a path, glob, http(s)://, hf://..."
        )


def _check_optimizer(config: TrainConfig) -> None:
    if config.optimizer != "adamw" and config.precision == "bf16-weights":
        raise UsageError(
            f"precision=bf16-weights has an AdamW of its own, and optimizer={config.optimizer}",
            hint="precision=bf16",
        )
    if config.clip_by == "value" and config.precision == "bf16-weights":
        raise UsageError("precision=bf16-weights clips by the norm alone", hint="precision=bf16, or clip_by=norm")


def _check_patience(config: TrainConfig) -> None:
    if config.patience and not config.eval_every:
        raise UsageError(f"patience={config.patience} counts validations, and eval_every=0", hint="eval_every=200")


def _check_vocab(config: TrainConfig) -> None:
    unit = min(8, config.VOCAB_MULTIPLE)
    if config.vocab_size % unit:
        raise UsageError(
            f"vocab_size={config.vocab_size} is not a multiple of {unit}", hint="0 takes the tokenizer's, rounded up"
        )


_RULES: tuple[Callable[[TrainConfig], None], ...] = (
    _check_rates,
    _check_batch,
    _check_data,
    _check_optimizer,
    _check_patience,
    _check_vocab,
)

"""The settings of a recipe as text: `--show` (values, origins, meanings, what follows) and `--help-settings`.

Owns the layout; what is said about a setting is declared with it. Needs torch only where there is a GPU to plan for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jackline import accelerator
from jackline.machine.gpu.watch import read_gpus
from jackline.settings import Setting, groups_of
from jackline.trainer.config import Resolved, TrainConfig

_Row = tuple[str, str, str, str]  # name, value, origin, meaning
_WIDEST = 24


def settings_text(resolved: Resolved) -> str:
    """`--show`: a row for each setting, group by group."""
    config = resolved.config
    groups: dict[str, list[_Row]] = {}
    for group, members in groups_of(type(config)).items():
        groups[group] = [
            (
                one.name,
                shown_value(getattr(config, one.name)),
                resolved.origins.get(one.name, "recipe"),
                _meaning(one),
            )
            for one in members
        ]
    groups["on this machine"] = [(*pair, "chosen by plan", "") for pair in chosen_values(config).items()]
    rows = [row for members in groups.values() for row in members]
    # A long value (an address of data) must not push the meanings of all others off the screen.
    widths = [min(_WIDEST, max(len(row[place]) for row in rows)) for place in range(3)]
    return "\n\n".join(
        "\n".join([f"{group}:", *(_line(row, widths) for row in members)]) for group, members in groups.items()
    )


def help_text(target: str, config: TrainConfig) -> str:
    """`--help-settings`: what may be set, with the recipe's own defaults. Needs no data and resolves nothing."""
    other_names: dict[str, list[str]] = {}
    for other, name in config.ALIASES.items():
        other_names.setdefault(name, []).append(other)
    parts = [f"Settings of recipe '{target}': --name value or name=value, or `name: value` in a file for --config."]
    for group, members in groups_of(type(config)).items():
        lines = [f"{group}:"]
        for one in members:
            if one.name == "recipe":
                continue
            lines.append(f"  {one.name} = {shown_value(getattr(config, one.name))}  ({one.values_text})")
            also = f" Also: {', '.join(other_names[one.name])}." if one.name in other_names else ""
            if one.declared.meaning or also:
                lines.append(f"      {one.declared.meaning}{also}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _meaning(one: Setting) -> str:
    """With the unit, where the words do not name it."""
    meaning, unit = one.declared.meaning, one.declared.unit
    return meaning if unit.lower() in meaning.lower() else f"{meaning} [{unit}]".strip()


def _line(row: _Row, widths: Sequence[int]) -> str:
    return "  ".join([*(f"{word:<{width}}" for word, width in zip(row, widths, strict=False)), row[3]]).rstrip()


def chosen_values(config: TrainConfig) -> Mapping[str, str]:
    """What a run would use here: batch, micro-batch, accumulation, loader threads, precision."""
    if not config.is_language:  # nothing is planned
        return {"-> batch": f"{config.batch_size} samples, {config.micro_batch or config.batch_size} at a time"}
    has_gpu = config.device != "cpu" and bool(read_gpus())
    if has_gpu:
        micro_batch, precision, why = _planned(config)
    else:
        micro_batch = config.micro_batch or config.cpu_micro_batch
        why = (
            f"{'the whole batch' if micro_batch == config.batch_size else 'what a CPU takes at a time'}: no GPU here"
        )
        precision = "fp32" if config.precision == "auto" else config.precision
    return {
        "-> batch": f"{config.batch_size} x {config.seq_len} tokens",
        "-> micro-batch": f"{micro_batch} ({why if not config.micro_batch else 'as asked'})",
        "-> accumulation": str(-(-config.batch_size // micro_batch)),
        "-> loader threads": str(config.num_threads),
        "-> precision": precision,
    }


def _planned(config: TrainConfig) -> tuple[int, str, str]:
    from jackline.trainer.network import shape_of
    from jackline.trainer.planning.plan import TOKENIZER_SIZES, choose_micro_batch
    from jackline.trainer.startup.device import choose_device
    from jackline.trainer.startup.precision import choose_precision

    device = choose_device(config)
    precision = choose_precision(config.precision, device)
    shape = shape_of(config, TOKENIZER_SIZES.get(config.tokenizer, TOKENIZER_SIZES["gpt2"]))
    chosen = choose_micro_batch(config, shape, precision, is_on_gpu=accelerator.is_gpu(device))
    return chosen.micro_batch, precision, chosen.text


def shown_value(value: object) -> str:
    """As a person would type it; '-' for nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"

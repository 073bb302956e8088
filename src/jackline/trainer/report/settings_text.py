"""`--show`: every setting with its value and origin, and what follows from them on this machine.

Owns the words. Needs torch only where there is a card to plan for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from jackline.machine.gpu.watch import read_gpus
from jackline.trainer.config import Resolved, TrainConfig


def settings_text(resolved: Resolved) -> str:
    config = resolved.config
    values = {name: value for name, value in asdict(config).items() if name not in config.UNUSED}
    rows = [(name, _shown(value), resolved.origins.get(name, "recipe")) for name, value in values.items()]
    rows += [(name, value, "chosen by plan") for name, value in chosen_values(config).items()]
    left, middle = (max(len(row[place]) for row in rows) for place in (0, 1))
    return "\n".join(f"{name:<{left}}  {value:<{middle}}  {origin}" for name, value, origin in rows)


def chosen_values(config: TrainConfig) -> Mapping[str, str]:
    """What a run would use here: batch, micro-batch, accumulation, loader threads, precision."""
    if not config.is_language:  # nothing is planned
        return {"-> batch": f"{config.batch_size} samples, {config.micro_batch or config.batch_size} at a time"}
    has_card = config.device != "cpu" and bool(read_gpus())
    if has_card:
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
    from jackline.trainer.build import choose_device
    from jackline.trainer.network import shape_of
    from jackline.trainer.planning.plan import TOKENIZER_SIZES, choose_micro_batch
    from jackline.trainer.startup.precision import choose_precision

    device = choose_device(config)
    precision = choose_precision(config.precision, device)
    shape = shape_of(config, TOKENIZER_SIZES.get(config.tokenizer, TOKENIZER_SIZES["gpt2"]))
    chosen = choose_micro_batch(config, shape, precision, is_on_card=device.type == "cuda")
    return chosen.micro_batch, precision, chosen.text


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"

"""docs/reference/settings.md, made from the declarations: `python -m jackline.trainer.settings_page > FILE`.

Owns the page's words and order. A test compares the file with `settings_page()`, so that it cannot be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jackline.session.settings import Settings
from jackline.settings import Setting, groups_of, settings_of
from jackline.trainer.config import TrainConfig
from jackline.trainer.recipe import RECIPES, load_recipe
from jackline.trainer.report.settings_text import shown_value

Show = Callable[[object], str]
_HEAD = """# Settings

<!-- Made from the declarations: `python -m jackline.trainer.settings_page > docs/reference/settings.md`. -->

`jackline train RECIPE --help-settings` prints the same for one recipe, `--show` prints the values that a command
would use. On the command line and in files durations are written `90s` or `1h30m` and sizes `20G`; in Python they are
numbers of seconds and bytes. `-` is an empty text. How settings are given, and which place has precedence:
[training a recipe](../guides/train.md#settings). How to declare your own: [below](#settings-of-your-own).
"""
_OWN = """## Settings of your own

A recipe of your own returns a `TrainConfig`, or a class that adds settings to it. A field with a plain default is a
setting; `setting` adds a meaning, a unit and what is allowed. Both are read, checked, shown and listed like ours.

```python
from dataclasses import dataclass
from jackline.settings import above, setting
from jackline.trainer.config import TrainConfig

@dataclass(frozen=True)
class MyConfig(TrainConfig):
    temperature: float = setting(1.0, "Divides the logits.", allowed=above(0))
    note: str = ""

def recipe() -> MyConfig:
    return MyConfig(data="corpus/*.txt")
```
"""


def settings_page() -> str:
    parts = [_HEAD, "## Every training\n", *_groups(TrainConfig(), without=())]
    for name, (_, line) in RECIPES.items():
        parts += [f"## Recipe `{name}`\n", f"{line}\n", *_recipe(load_recipe(name, TrainConfig))]
    parts += ["## `jackline.attach`\n", "Keywords of `attach` ([your own loop](../guides/own-loop.md)).\n"]
    parts += [*_groups(Settings(), without=(), show=repr), _OWN]
    return "\n".join(parts)


def _recipe(config: TrainConfig) -> Iterator[str]:
    """What differs from every training: other defaults and meanings, its own settings, settings without use."""
    common = settings_of(TrainConfig)
    other = [
        one
        for name, one in settings_of(type(config)).items()
        if name in common and name not in config.UNUSED and _differs(one, common[name], getattr(config, name))
    ]
    if other:
        yield "Other than above:\n"
        yield _table(other, config)
    yield from _groups(config, without=common)
    if config.UNUSED:
        yield "Not used: " + ", ".join(f"`{name}`" for name in common if name in config.UNUSED) + ".\n"


def _differs(one: Setting, common: Setting, value: object) -> bool:
    return value != common.default or one.declared != common.declared or one.type != common.type


def _groups(config: object, without: Iterable[str], show: Show = shown_value) -> Iterator[str]:
    for group, members in groups_of(type(config)).items():
        own = [one for one in members if one.name not in without]
        if own:
            yield f"### {group}\n"
            yield _table(own, config, show)


def _table(members: Iterable[Setting], config: object, show: Show = shown_value) -> str:
    rows = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for one in members:
        words = (
            f"`{one.name}`",
            f"`{show(getattr(config, one.name))}`",
            one.values_text,
            one.declared.meaning,
        )
        rows.append("| " + " | ".join(word.replace("|", "\\|") for word in words) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(settings_page(), end="")

"""What is said about the settings: each has a meaning and a group, and every place that lists them agrees."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.session.settings import Settings
from jackline.settings import OWN_GROUP, check_value, groups_of, settings_of
from jackline.trainer import setting_groups
from jackline.trainer.config import TrainConfig, identity, resolve
from jackline.trainer.recipe import RECIPES, load_recipe
from jackline.trainer.report.settings_text import help_text, settings_text
from jackline.trainer.settings_page import settings_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
MOST_IN_A_GROUP = 12
KINDS = {**{name: type(load_recipe(name, TrainConfig)) for name in RECIPES}, "attach": Settings}
OWN_RECIPE = """
from dataclasses import dataclass, field
from typing import ClassVar
from jackline.settings import above, setting
from jackline.trainer.config import TrainConfig

@dataclass(frozen=True)
class MyConfig(TrainConfig):
    temperature: float = setting(1.0, "Divides the logits.", allowed=above(0))
    horizon: int | None = None
    note: str = ""
    layers: list[int] = field(default_factory=list)

def recipe() -> MyConfig:
    return MyConfig(data="corpus/*.txt")
"""


def test_the_page_is_what_the_declarations_say() -> None:
    assert PAGE.read_text() == settings_page(), f"python -m jackline.trainer.settings_page > {PAGE.name}"


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_has_a_meaning_a_group_and_a_valid_default(name: str) -> None:
    for one in settings_of(KINDS[name]).values():
        meaning = one.declared.meaning
        assert meaning.endswith(".") and "\n" not in meaning and len(meaning) <= 120, one.name
        assert one.declared.group != OWN_GROUP, one.name
        if one.default is not None:
            check_value(one, one.default)


@pytest.mark.parametrize("name", KINDS)
def test_a_group_is_small_enough_to_be_read_at_once(name: str) -> None:
    for group, members in groups_of(KINDS[name]).items():
        assert len(members) <= MOST_IN_A_GROUP, group


def test_every_training_setting_is_declared_in_one_group_class_of_at_most_twelve() -> None:
    classes = [found for found in vars(setting_groups).values() if isinstance(found, type) and is_dataclass(found)]
    declared = [entry.name for found in classes for entry in fields(found)]
    assert sorted(declared) == sorted(entry.name for entry in fields(TrainConfig)), (
        "none twice, none beside the groups"
    )
    assert max(len(fields(found)) for found in classes) <= MOST_IN_A_GROUP


@pytest.mark.parametrize("name", RECIPES)
def test_the_help_names_every_setting_that_may_be_set_and_no_other(name: str) -> None:
    config = load_recipe(name, TrainConfig)
    lines = help_text(name, config).splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert sorted(listed) == sorted(
        entry.name for entry in fields(config) if entry.name not in config.UNUSED and entry.name != "recipe"
    )


def test_the_help_of_a_setting_has_default_type_range_meaning_and_other_names() -> None:
    text = help_text("demo", load_recipe("demo", TrainConfig))
    assert text.startswith(
        "Settings of recipe 'demo': --name value or name=value, or `name: value` in a file for --config.\n\n"
        "model:\n"
        "  model = nano  (nano, tiny, small, medium or xl)\n"
        "      Size of the model. Also: model_size.\n"
    )
    assert (
        "  lr = 0.001  (number, above 0)\n      Highest learning rate of the schedule. Also: learning_rate.\n" in text
    )
    assert "  max_cache_bytes = 0  (size, 0 or more)\n" in text
    assert "  time_limit_s = 0  (duration, 0 or more)\n" in text


def own_recipe(folder: Path) -> str:
    path = folder / "my_settings.py"
    path.write_text(OWN_RECIPE)
    return f"{path}:recipe"


def test_a_recipe_of_ones_own_declares_settings_the_same_way(tmp_path: Path) -> None:
    target = own_recipe(tmp_path)
    found = resolve(target, ["--temperature", "0.5", "--horizon", "3", "note=hello"])
    assert {name: identity(found.config)[name] for name in ("temperature", "horizon", "note")} == {
        "temperature": 0.5,
        "horizon": 3,
        "note": "hello",
    }
    assert resolve(target, ["horizon=none"]).config.horizon is None  # type: ignore[attr-defined]
    assert help_text(target, load_recipe(target, TrainConfig)).endswith(
        f"{OWN_GROUP}:\n"
        "  temperature = 1  (number, above 0)\n"
        "      Divides the logits.\n"
        "  horizon = None  (whole number)\n"
        "  note = -  (text)\n"
        "  layers = []  (list)"
    )
    assert "\ntemperature         0.5                       command line" in settings_text(found)


def test_the_example_on_the_page_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "from_the_page.py"
    path.write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    assert identity(resolve(f"{path}:recipe", ["temperature=2", "note=x"]).config)["temperature"] == 2.0


def test_wrong_values_of_ones_own_settings_are_named(tmp_path: Path) -> None:
    target = own_recipe(tmp_path)
    mistakes = {
        "temperature=0": "error: temperature=0.0 is too small\n       temperature: Divides the logits.\n"
        "hint: it must be above 0",
        "temprature=1": f"error: unknown setting 'temprature' for recipe '{target}'\n"
        "hint: did you mean 'temperature'?",
        "horizon=few": "error: horizon=few is not a whole number",
        "layers=3": "error: layers cannot be set by a word: nobody knows how to read a list\n"
        "hint: int, float, bool, str and Literal can be read; for others give setting(..., read=function)",
    }
    for word, text in mistakes.items():
        with pytest.raises(UsageError) as caught:
            resolve(target, [word])
        assert str(caught.value) == text


def test_a_wrong_value_in_a_recipes_own_code_is_an_error_too() -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(schedule="cosin")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "error: schedule is one of cosine, constant, wsd, one-cycle, not 'cosin'\nhint: did you mean 'cosine'?"
    )


def test_a_wrong_keyword_of_attach_is_named_with_what_is_allowed() -> None:
    with pytest.raises(UsageError) as caught:
        Settings(save_every_s=0)
    assert str(caught.value) == (
        "error: save_every_s=0 is too small\n"
        "       save_every_s: Time between checkpoints; both None: as often as costs under 0.5 % of the time.\n"
        "hint: it must be above 0"
    )

"""The help: every command and every option says what it does."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from jackline.cli.main import COMMANDS, cli


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from walk(below, (*path, name))


ALL = dict(walk(cli, ("jackline",)))


def test_the_walk_reaches_the_commands_of_groups() -> None:
    assert {f"jackline {name}" for name in COMMANDS} | {"jackline data prepare"} <= set(ALL)


@pytest.mark.parametrize("path", ALL)
def test_every_option_says_what_it_does(path: str) -> None:
    bare = [
        parameter.opts[0]
        for parameter in ALL[path].params
        if isinstance(parameter, click.Option) and not (parameter.help or "").strip()
    ]
    assert bare == [], f"{path}: options without a description"


@pytest.mark.parametrize("path", ALL)
def test_a_description_is_a_sentence(path: str) -> None:
    """It begins with a capital (or a name that has none) and ends with a full stop."""
    wrong = [
        f"{parameter.opts[0]}: {parameter.help}"
        for parameter in ALL[path].params
        if isinstance(parameter, click.Option) and not (parameter.help or ".").rstrip().endswith((".", "..."))
    ]
    assert wrong == []


@pytest.mark.parametrize("path", ALL)
def test_every_command_explains_itself(path: str) -> None:
    command = ALL[path]
    assert (command.help or "").strip(), f"{path} has no help text"
    assert command.get_short_help_str().strip()

"""`--flag_name` and `--flag-name` are the same, for every command and for a recipe's settings."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from jackline.cli.main import cli


@pytest.mark.parametrize("flag", ["--on-stuck", "--on_stuck"])
def test_both_writings_of_an_option_are_read(flag: str) -> None:
    done = CliRunner().invoke(cli, ["run", flag, "nonsense", "--", "true"])
    assert done.exit_code == 2
    assert "Invalid value for '--on-stuck': 'nonsense' is not one of 'report', 'restart', 'stop'." in done.output


def test_an_option_nobody_knows_is_refused_with_the_nearest() -> None:
    done = CliRunner().invoke(cli, ["run", "--stuck_aftr", "3", "--", "true"])
    assert done.exit_code == 2
    assert "No such option" in done.output and "--stuck-after" in done.output

"""An error is told once: by the program, or by the supervisor where the program did not."""

from __future__ import annotations

import pytest

from jackline.cli.view.notes import Shown

TOLD = "error: no data: x.txt\n       there is no file x.txt\n       it ran for 3.8 s\nhint: check the path"


@pytest.mark.parametrize(
    ("above", "said"),
    [
        ("", TOLD),
        ("something else\n", TOLD),
        ("error: no data\n", TOLD),  # not the same error
        (
            "error: no data: x.txt\n       there is no file x.txt\nhint: check the path\n",
            "exited because of the error above; it ran for 3.8 s",
        ),
        (
            "error: no data: x.txt\n",
            "exited because of the error above; there is no file x.txt\nit ran for 3.8 s\nhint: check the path",
        ),
        (TOLD + "\n", "exited because of the error above"),
        (TOLD.replace("x.txt", "x.txt and much more that was cut") + "\n", "exited because of the error above"),
        (TOLD + "\n" + "steps\n" * 3000, TOLD),  # far above: no longer on the screen
    ],
)  # fmt: skip
def test_what_stands_right_above_is_not_said_again(above: str, said: str) -> None:
    shown = Shown()
    for at in range(0, len(above), 7):
        shown.add(above[at : at + 7].encode())
    assert shown.without_repetition(TOLD) == said


def test_a_note_that_is_no_error_is_said_as_it_is() -> None:
    shown = Shown()
    shown.add(b"attempt 2 begins\n")
    assert shown.without_repetition("attempt 2 begins") == "attempt 2 begins"

"""A few rounds of `scripts/torture disk`, for the suite: one fault of each kind under a plain command and a build."""

from __future__ import annotations

import pytest

from tests.places import Unavailable
from tests.stories.disk_torture import SUBJECTS, new_world, one_round, undisturbed

pytestmark = pytest.mark.zoo
SUBJECT = {subject.name: subject for subject in SUBJECTS}


@pytest.mark.parametrize(
    ("name", "fault", "moment"),
    [("run", "no bytes", "step 40/60"), ("run", "read-only", "step 3/60"), ("data", "no inodes", "")],
)
def test_a_disk_that_refuses_costs_nothing_once_it_has_room(name: str, fault: str, moment: str) -> None:
    subject = SUBJECT[name]
    try:
        wanted = undisturbed(subject)
        with new_world(subject) as world:
            assert one_round(world, subject, fault, moment, wanted) == []
    except Unavailable as reason:
        pytest.skip(str(reason))

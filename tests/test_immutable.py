"""Classes that become frozen dataclasses at first use: nobody who uses one can tell."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

from jackline.immutable import immutable


@immutable
class Place:
    """Where a run is."""

    folder: str
    kind: str = "local"
    parts: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.folder:
            raise ValueError("no folder")


@immutable
class Far(Place):
    host: str = "here"


@dataclass(frozen=True)
class Farther(Place):
    hops: int = 2


class Named(Far):
    pass


@immutable
class Untouched:
    size: int = 1
    inner: list[int] = field(default_factory=list, compare=False)


def test_it_is_a_frozen_dataclass() -> None:
    place = Place("a", parts=(1,))
    assert (repr(place), place) == ("Place(folder='a', kind='local', parts=(1,))", Place("a", "local", (1,)))
    assert hash(place) == hash(Place("a", parts=(1,))) and place != Far("a", parts=(1,))
    assert (replace(place, kind="far").kind, asdict(place)["parts"], is_dataclass(Place)) == ("far", (1,), True)
    with pytest.raises(FrozenInstanceError):
        place.kind = "far"  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"Place\.__init__\(\) missing 1 required positional argument: 'folder'"):
        Place()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no folder"):
        Place("")


def test_its_fields_can_be_asked_for_before_there_is_an_instance() -> None:
    assert [(each.name, each.compare) for each in fields(Untouched)] == [("size", True), ("inner", False)]
    assert Untouched(inner=[1]) == Untouched(inner=[2])


def test_classes_are_derived_from_it_in_every_way() -> None:
    assert repr(Named("a", host="b")) == "Named(folder='a', kind='local', parts=(), host='b')"
    assert Farther("a", hops=3).hops == 3 and Far("a").host == "here"
    match Far("a", "k"):
        case Far(folder, kind):
            assert (folder, kind) == ("a", "k")


@pytest.mark.parametrize("made", ["pickle", "copy"])
def test_an_instance_that_was_made_without_init_is_equal_too(made: str) -> None:
    """In a process that has not made one before."""
    program = (
        "import pickle, copy, sys; from tests.test_immutable import Untouched\n"
        "one = pickle.loads(bytes.fromhex(sys.argv[1])); two = copy.copy(one)\n"
        "assert one == two and repr(one) == 'Untouched(size=7, inner=[])', one"
    )
    data = pickle.dumps(copy.copy(Untouched(7)) if made == "copy" else Untouched(7)).hex()
    done = subprocess.run([sys.executable, "-c", program, data], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_many_threads_may_make_the_first_one() -> None:
    for _ in range(50):
        cls: Any = immutable(type("Fresh", (), {"__annotations__": {"size": int}, "__doc__": "x"}))
        barrier, found = threading.Barrier(4), []

        def make(cls: Any = cls, barrier: threading.Barrier = barrier, found: list[Any] = found) -> None:
            barrier.wait()
            found.append(cls(size=3))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.size for one in found] == [3, 3, 3, 3]

"""Which checkpoint a job resumes from when each of its machines has a folder of its own, and who sends what to whom.

Every machine commits a checkpoint with the parts of its own ranks (FSDP2), or with everything (DDP). Its manifest
says which ranks those are, how many there were, and which save it belongs to: `key`. The checkpoints of one key make
one checkpoint of the job; it is whole when every rank is in one of them. They may be on any machine of the job, as a
neighbour's copy, or in the mirror.

Pure decisions on lists of `Holding`; every rank makes them with the same list and so knows all of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jackline.checkpoint.format.manifest import STATE, Damage, FileEntry, Manifest, is_of_rank, parse_manifest
from jackline.immutable import immutable
from jackline.units import rank_words

KEY, PARTS_OF, MACHINES, FOR_MIRROR = "key", "parts_of", "machines", "for_mirror"  # among the facts of a manifest
STORE = -1  # the place of what only the mirror has
_RANK = re.compile(r"\.rank-(\d{1,7})(?:\.|$)")


@immutable
class Machine:
    """This machine among those of the job. `ranks`: of every machine, by the name of its run there."""

    number: int
    ranks: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def members(self) -> tuple[int, ...]:
        return self.ranks[self.number][1]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every machine: it commits, sends and receives for the others."""
        return tuple(members[0] for _, members in self.ranks)


@immutable
class Saved:
    """What the manifests of this machine's checkpoints say of it. `token` is that of the attempt."""

    machine: Machine
    token: str

    def facts(self, number: int, *, is_divided: bool, is_for_mirror: bool) -> dict[str, Any]:
        """`number`: of the save among those of the attempt, or its step where each machine saves everything."""
        ranks = {name: list(members) for name, members in self.machine.ranks}
        found: dict[str, Any] = {KEY: f"{self.token}-{number}", MACHINES: ranks}
        if not is_divided:
            return found
        return {**found, PARTS_OF: list(self.machine.members), FOR_MIRROR: is_for_mirror}


@immutable
class Holding:
    """A checkpoint of one machine, and where it is: on machine number `place`, or in the mirror. `path`: there."""

    place: int
    path: str
    manifest: Manifest

    @property
    def where(self) -> str:
        """Its name among all: machines may use the same paths."""
        return f"{self.place} {self.path}"

    @property
    def key(self) -> str:
        return str(self.manifest.facts.get(KEY) or f"alone {self.manifest.content}")

    @property
    def size(self) -> int:
        """The number of ranks that have a part in it."""
        told = self.manifest.facts.get("ranks")
        return int(told) if self.is_part and isinstance(told, int) else 1

    @property
    def is_part(self) -> bool:
        return isinstance(self.manifest.facts.get(PARTS_OF), list)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(map(int, self.manifest.facts[PARTS_OF])) if self.is_part else frozenset((0,))

    def to_json(self) -> dict[str, Any]:
        return {"place": self.place, "path": self.path, "manifest": self.manifest.to_bytes().decode()}


def read_holding(told: Mapping[str, Any]) -> Holding:
    return Holding(int(told["place"]), str(told["path"]), parse_manifest(str(told["manifest"]).encode()))


@immutable
class Choice:
    """What the job resumes from, and the newer ones that are not whole, with the reason."""

    holdings: tuple[Holding, ...] = ()  # the one with the lowest rank first; empty: there is none
    passed: tuple[tuple[tuple[Holding, ...], str], ...] = ()

    @property
    def base(self) -> Holding:
        """The one whose state.json counts: it has the lowest rank."""
        return self.holdings[0]


def choose(holdings: Iterable[Holding], *, step: int | None = None) -> Choice:
    """The newest save of which every rank's part is somewhere."""
    groups: dict[str, list[Holding]] = {}
    for holding in holdings:
        if step in (None, holding.manifest.step):
            groups.setdefault(holding.key, []).append(holding)
    newest_first = sorted(groups.values(), key=_age, reverse=True)
    passed: list[tuple[tuple[Holding, ...], str]] = []
    for group in newest_first:
        group.sort(key=lambda one: (min(one.ranks), one.place == STORE, one.place))
        missing = set(range(group[0].size)).difference(*(one.ranks for one in group))
        if not missing:
            return Choice(tuple(group), tuple(passed))
        passed.append((tuple(group), _missing_words(group, missing)))
    return Choice((), tuple(passed))


def goes_to_mirror(manifest: Manifest) -> bool:
    """Parts go there only at saves that all machines upload: one machine's parts alone are worth nothing."""
    return PARTS_OF not in manifest.facts or bool(manifest.facts.get(FOR_MIRROR))


def _age(group: list[Holding]) -> tuple[int, float]:
    return group[0].manifest.step, max(one.manifest.created_at_s for one in group)


def _missing_words(group: Sequence[Holding], missing: set[int]) -> str:
    """'the parts of ranks 2-3, which demo-B has saved, are on none of the machines'"""
    told = group[0].manifest.facts.get(MACHINES)
    machines = told if isinstance(told, dict) else {}
    owners = sorted(name for name, ranks in machines.items() if isinstance(ranks, list) and missing & set(ranks))
    whose = f", saved by {' and '.join(owners)}," if owners else ""
    is_one = len(missing) == 1
    parts = f"the part of {rank_words(sorted(missing))}" if is_one else f"the parts of {rank_words(sorted(missing))}"
    return f"{parts}{whose} {'is' if is_one else 'are'} on none of the machines and not in a mirror"


@immutable
class Move:
    """A file that machine `target` needs and does not have. `source`: who has it."""

    entry: FileEntry
    source: Holding
    target: int


def entries_for(
    choice: Choice, place: int, members: Iterable[int], size: int
) -> dict[str, tuple[FileEntry, Holding]]:
    """The files that machine `place` needs, each with the nearest place that has it.

    With as many ranks as were saved, each needs its own part; else the parts are cut in another way, and all are
    needed. What is not divided comes from the holding with the lowest rank, as rank 0 has saved it for all.
    """
    base = next((one for one in choice.holdings if one.place == place and not one.is_part), choice.base)
    wanted = None if size != choice.base.size else set(members)
    found: dict[str, tuple[FileEntry, Holding]] = {}
    for holding in sorted(choice.holdings, key=lambda one: (one.place != place, one.place == STORE)):
        for entry in holding.manifest.files:
            if not holding.is_part or not is_of_rank(entry.name):
                continue
            if wanted is None or _rank_of(entry.name) in wanted:
                found.setdefault(entry.name, (entry, holding))
    near = [one for one in choice.holdings if _is_same(one, base)]
    here = next((one for one in near if one.place == place), near[0])
    for entry in base.manifest.files:
        if not base.is_part or not is_of_rank(entry.name):
            found[entry.name] = (entry, here)
    return found


def _is_same(one: Holding, base: Holding) -> bool:
    return one.manifest.content == base.manifest.content


def _rank_of(name: str) -> int:
    match = _RANK.search(name)
    return int(match[1]) if match else -1


def moves(choice: Choice, machines: Sequence[tuple[str, tuple[int, ...]]], size: int) -> list[Move]:
    """What has to be sent or fetched, in the order in which every machine does it."""
    found = []
    for place, (_, members) in enumerate(machines):
        wanted = entries_for(choice, place, members, size)
        for _, (entry, holding) in sorted(wanted.items()):
            if holding.place != place:
                found.append(Move(entry, holding, place))
    return found


def joined_manifest(choice: Choice, entries: Iterable[FileEntry]) -> Manifest:
    """The manifest of the files that one machine has put together. Raises Damage where they cannot be checked."""
    base = choice.base.manifest
    if any(one.manifest.algorithm != base.algorithm for one in choice.holdings):
        raise Damage("its parts have different kinds of checksums")
    files = tuple(sorted(entries, key=lambda entry: (entry.name == STATE, entry.name)))
    facts = {**base.facts, **({PARTS_OF: sorted(choice.base.ranks)} if choice.base.is_part else {})}
    return Manifest(base.step, base.created_at_s, base.algorithm, files, base.parent_step, base.metrics, facts)

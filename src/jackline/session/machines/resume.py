"""The resume of a job whose machines have folders of their own.

    every machine lists what it has, rank 0 also what the mirror has        all ranks get the same list
    -> the newest checkpoint of which every part is somewhere (holding.choose)
    -> every machine verifies its parts; a damaged one is dropped, and the choice is made again
    -> what a machine needs and does not have is sent by a neighbour, or fetched from the mirror, and verified
    -> every rank loads from what its machine has put together

All ranks call it, and all do the same steps in the same order. Owns the order and the sending.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jackline.checkpoint.format.manifest import Damage, Name, parse_name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.machines.holding import (
    STORE,
    Choice,
    Holding,
    Machine,
    Move,
    choose,
    entries_for,
    joined_manifest,
    moves,
    read_holding,
)
from jackline.checkpoint.machines.places import Joining, holdings_here, holdings_in_store, joined_folder
from jackline.checkpoint.mirror.apart import opened
from jackline.checkpoint.mirror.fetch import LIST_TIMEOUT_S, within
from jackline.checkpoint.state import load
from jackline.checkpoint.state.frozen import FrozenHashes
from jackline.errors import CannotResume, UsageError
from jackline.rundir.access.secrets import without_secrets
from jackline.session.metrics.reporting import say

_BLOCK_BYTES = 8 << 20


def load_apart(
    ranks: Any, engine: Any, into: MutableMapping[str, Any], *, step: int | None = None
) -> load.Receipt | None:
    """Fill `into` on every rank from the newest checkpoint of the job that is whole. None: there is none at all."""
    machine: Machine = ranks.machine
    is_leader = ranks.rank in machine.leaders
    engine.wait_ready()
    here = holdings_here(engine.folder, machine.number) if is_leader else []
    found = [read_holding(told) for text in ranks.gather(_as_text(here)) for told in json.loads(text)]
    stored, trouble = _from_mirror(ranks, engine, found)
    found += stored
    refused: list[str] = []
    while True:
        choice = choose(found, step=step)
        if not choice.holdings:
            _refuse(choice, refused, step, trouble)
            return None
        if is_leader:
            _pass_over(choice, machine, engine)
        token = ranks.from_first(os.urandom(4).hex())
        problems = _verify(ranks, choice) or _join(ranks, engine, choice, token)
        if not problems:
            break
        refused += [f"{_name_of(one)}: {problems[one.where]}" for one in choice.holdings if one.where in problems]
        for one in choice.holdings:
            if is_leader and one.where in problems and one.place == machine.number:
                _set_aside(engine, one, problems[one.where])
        found = [one for one in found if one.where not in problems]
    folder = joined_folder(engine.folder, token)
    try:
        return _load(ranks, engine, into, folder, choice)
    finally:
        if is_leader:
            shutil.rmtree(folder, ignore_errors=True)


def _name_of(holding: Holding) -> str:
    where = "in the mirror" if holding.place == STORE else f"on machine {holding.place}"
    return f"{Path(holding.path).name} {where}"


def _as_text(holdings: Sequence[Holding]) -> str:
    return json.dumps([one.to_json() for one in holdings])


def _from_mirror(ranks: Any, engine: Any, found: Sequence[Holding]) -> tuple[list[Holding], str]:
    """What the mirror has of the runs of all machines, those that were lost too. Rank 0 asks it for all."""
    stored, why = list[Holding](), ""
    if ranks.is_first and engine.settings.mirror and engine.settings.resume_from_mirror:
        names = {name for name, _ in ranks.machine.ranks}
        names |= {name for one in found for name in one.manifest.facts.get("machines") or ()}
        place = engine.settings.mirror
        try:
            is_needed = not choose(found).holdings  # there is nothing else to resume from: then it is waited for
            look = partial(_look_into, place, names)
            stored = look() if is_needed else within(LIST_TIMEOUT_S, look)
        except Exception as problem:  # a store may raise any exception
            why = f"the mirror {without_secrets(place)} cannot be read: {without_secrets(str(problem))}"
            say(f"{why}; continuing with what the machines have")
    told = json.loads(ranks.from_first(json.dumps({"stored": [one.to_json() for one in stored], "why": why})))
    return [read_holding(one) for one in told["stored"]], str(told["why"])


def _look_into(place: str, names: set[str]) -> list[Holding]:
    with opened(place) as store:
        return holdings_in_store(store, names)


def _refuse(choice: Choice, refused: Sequence[str], step: int | None, trouble: str) -> None:
    """Raise CannotResume that says what is missing, unless nothing was ever saved."""
    if not choice.passed and not refused and not trouble:
        if step is not None:
            raise UsageError(f"there is no checkpoint of step {step} on any machine of this job")
        return
    detail = [f"step {group[0].manifest.step}: {why}" for group, why in choice.passed]
    raise CannotResume(
        "no checkpoint of this job is whole" if choice.passed or refused else "nothing to resume from is here",
        detail=(*detail, *refused, *([trouble] if trouble else [])),
        hint="start the machine that has what is missing, or give the mirror (--mirror); from the beginning: --new",
    )


def _pass_over(choice: Choice, machine: Machine, engine: Any) -> None:
    """Newer ones that are not whole: set aside where they are, so that they do not count as good ones."""
    for group, why in choice.passed:
        for one in group:
            if one.place == machine.number:
                _set_aside(engine, one, why)


def _set_aside(engine: Any, holding: Holding, why: str) -> None:
    """Only what this machine itself has saved: a copy of a neighbour's is replaced by the next."""
    path = Path(holding.path)
    if path.parent == engine.folder and (name := parse_name(path.name)) is not None:
        engine.refuse(load.Refusal(name, why))


def _verify(ranks: Any, choice: Choice) -> dict[str, str]:
    """Every machine reads its parts of the choice. What is wrong on any of them, by where it is."""
    problems = {}
    for one in choice.holdings:
        if one.place == ranks.machine.number and ranks.rank in ranks.machine.leaders:
            try:
                verify_checkpoint(Path(one.path))
            except (Damage, OSError) as problem:
                problems[one.where] = str(problem)
    return _of_all(ranks, problems)


def _of_all(ranks: Any, problems: Mapping[str, str]) -> dict[str, str]:
    return {where: why for text in ranks.gather(json.dumps(problems)) for where, why in json.loads(text).items()}


def _join(ranks: Any, engine: Any, choice: Choice, token: str) -> dict[str, str]:
    """Put together what this machine's ranks need. All ranks call it; the leaders send, receive and fetch."""
    machine: Machine = ranks.machine
    problems = dict[str, str]()
    if ranks.rank in machine.leaders:
        joining = Joining(engine.folder, token, choice.base.manifest.step)
        wanted = entries_for(choice, machine.number, machine.members, ranks.size)
        for entry, holding in wanted.values():
            if holding.place == machine.number:
                joining.link(Path(holding.path), entry)
        for move in moves(choice, machine.ranks, ranks.size):
            problems |= _carry(ranks, engine, move, joining)
        manifest = joined_manifest(choice, (entry for entry, _ in wanted.values()))
        problems |= {wanted[name][1].where: why for name, why in joining.take_fetched(manifest).items()}
        if problems:
            joining.clear()
    return _of_all(ranks, problems)


def _carry(ranks: Any, engine: Any, move: Move, joining: Joining) -> dict[str, str]:
    """One file: its owner sends, or its target fetches it from the mirror. Other machines do nothing here."""
    machine: Machine = ranks.machine
    is_target = machine.number == move.target
    try:
        if move.source.place == STORE:
            if is_target:
                with opened(engine.settings.mirror or "") as store:
                    store.get(f"{move.source.path}/{move.entry.name}", joining.place_for(move.entry))
        elif machine.number == move.source.place:
            _send(
                ranks, Path(move.source.path) / move.entry.name, move.entry.size_bytes, machine.leaders[move.target]
            )
        elif is_target:
            sender = machine.leaders[move.source.place]
            _receive(ranks, joining.place_for(move.entry), move.entry.size_bytes, sender)
    except Exception as problem:  # a store may raise any exception
        return {move.source.where: str(problem) or type(problem).__name__}
    return {}


def _send(ranks: Any, path: Path, size_bytes: int, to: int) -> None:
    """Exactly that many bytes, whatever happens to the file: the other side waits for them, and verifies them."""
    fd, problem = -1, None
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    block = torch.zeros(min(size_bytes, _BLOCK_BYTES), dtype=torch.uint8)
    view = memoryview(block.numpy().data)
    for start in range(0, size_bytes, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, size_bytes - start)
        try:
            os.preadv(fd, [view[:count]], start)
        except OSError as error:
            problem = error
        dist.send(block[:count], dst=to, group=ranks.group)
    if fd >= 0:
        os.close(fd)
    if problem is not None:
        raise problem


def _receive(ranks: Any, path: Path, size_bytes: int, sender: int) -> None:
    """All of it, also where it cannot be written: the sender would wait."""
    problem = None
    block = torch.empty(min(size_bytes, _BLOCK_BYTES), dtype=torch.uint8)
    for start in range(0, size_bytes, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, size_bytes - start)
        dist.recv(block[:count], src=sender, group=ranks.group)
        try:
            with open(path, "ab") as file:
                file.write(memoryview(block.numpy().data)[:count])
        except OSError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    path.touch()  # of an empty one nothing came


def _load(ranks: Any, engine: Any, into: MutableMapping[str, Any], folder: Path, choice: Choice) -> load.Receipt:
    """Every rank, from what its machine has put together. When one cannot, none resumes."""
    receipt: load.Receipt | None = None
    problem: Exception | None = None
    try:
        engine.before_change()
        engine.note_program(into)
        name = Name(choice.base.manifest.step)
        receipt = load.load_newest(folder, into, hash_frozen=FrozenHashes(), only=name)
        engine.parent_step = name.step
    except Exception as error:
        problem = error
    texts = ranks.gather("" if problem is None else (str(problem).splitlines() or [type(problem).__name__])[0])
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text.strip():
            raise CannotResume(f"rank {rank} cannot resume: {text}", hint="that rank's own message says more")
    if receipt is None:
        raise CannotResume(f"step {choice.base.manifest.step} was put together and cannot be found")
    return dataclasses.replace(
        receipt, refused=tuple(load.Refusal(Name(group[0].manifest.step), why) for group, why in choice.passed)
    )

"""Ranks of a distributed job: which process is which, who has arrived at a collective and who has not. Pure.

A rank inside a collective waits in C++ code (gloo, NCCL) and answers no Python signal, so only its stack, read from
outside, tells where it is. Owns these questions and the rule `collective`, which names the rank that is missing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from jackline.diagnosis.doing import describe_wait, meeting
from jackline.diagnosis.frames import Frame, ProcessStack
from jackline.diagnosis.waiting import effective_wait
from jackline.immutable import immutable
from jackline.machine.readings import ProcessReading, Wait, ranks_among
from jackline.supervisor.hang.deadlock import Deadlock
from jackline.supervisor.hang.sample import FarRank
from jackline.supervisor.hang.scene import Kind, Scene, Verdict, naps
from jackline.supervisor.hang.text import frame_of, place_text
from jackline.supervisor.hang.views import ProcessView, is_paused
from jackline.supervisor.stacks.flight import Flight
from jackline.units import format_duration, rank_words

_DISTRIBUTED = ("torch/distributed/", "torch/nn/parallel/distributed.py")
_NOT_CALLED = ("wrapper", "__call__", "__torch_function__")
_BACKWARD = "_engine_run_backward"
_WAITS = re.compile(r"\.wait\(|\bwait_tensor\(")
_STANDS = ("lock", "poll", "network", "unknown")


def find_ranks(
    processes: Iterable[ProcessReading], stack_of: Callable[[int], ProcessStack | None]
) -> dict[int, ProcessReading]:
    """The process of each rank, by rank. mp.spawn tells its processes their number only as an argument, so there the
    order in which they were started counts."""
    processes = list(processes)
    found = ranks_among(processes)
    if found:
        return found
    spawned = [one for one in processes if one.state not in ("Z", "X") and _is_spawned(stack_of(one.pid))]
    spawned.sort(key=lambda one: (one.start_ticks, one.pid))
    return dict(enumerate(spawned)) if len(spawned) > 1 else {}


def _is_spawned(stack: ProcessStack | None) -> bool:
    """Whether mp.spawn has started it. The process that waits in mp.spawn for the others is no rank."""
    frames = stack.main.frames if stack and stack.main else ()
    return any(
        frame.file.endswith("torch/multiprocessing/spawn.py") and "_wrap" in frame.function for frame in frames
    )


def collective_at(stack: ProcessStack | None, wait: Wait) -> str:
    """The collective that its main thread is in: 'all_reduce'; '' when it is in none."""
    main = stack.main if stack else None
    if main is None or not main.frames:
        return ""
    inside = list(itertools.takewhile(lambda frame: not frame.is_user, main.frames))
    called = [frame.function for frame in inside if _is_distributed(frame)]
    if called:
        return called[-1]
    if wait.kind not in _STANDS:
        return ""
    # Gradients are exchanged by C++ code while backward() waits; a handle of an asynchronous call waits in C++ too.
    if any(frame.function.rpartition(".")[2] == _BACKWARD for frame in inside):
        return "backward, where gradients are exchanged"
    return "wait" if not inside and _WAITS.search(main.frames[0].source) else ""


def _is_distributed(frame: Frame) -> bool:
    is_inside = any(part in frame.file for part in _DISTRIBUTED)
    return is_inside and frame.function.rpartition(".")[2] not in _NOT_CALLED


# -- the rule ---------------------------------------------------------------------------------------------------

_LEAST_S = 20.0
_MOVES_S = 10.0  # a rank whose processes have moved within this time works
_TRAFFIC_BYTES_PER_S = 64_000.0
_TRAFFIC_CORES = 0.1
_MOST_GROUPS = 4
_CUT_SHARE = 0.4  # of the usual wait until it is named: the kernel has waited for 3 s before
_SILENT_S = 30.0  # a supervisor writes every second, and a network folder may lag
_ONE_SIDED = {
    "recv": "each of them receives and none sends; let one send first, or use batch_isend_irecv",
    "send": "each of them sends and none receives; let one receive first, or use batch_isend_irecv",
}


@immutable
class Standing:
    """Where one rank is. `collective` is '' for a rank that is in none."""

    rank: int
    view: ProcessView
    collective: str
    moved_at_s: float  # when it, or a process that it has started, moved last

    @property
    def where(self) -> str:
        place = place_text(frame_of(self.view))
        return f"{self.collective} at {place}" if place else self.collective


def standing_ranks(scene: Scene) -> list[Standing]:
    views = {view.reading.pid: view for view in (scene.leader, *scene.workers, *scene.others)}
    ranks = find_ranks((view.reading for view in views.values()), lambda pid: views[pid].stack)
    found = []
    for rank, reading in ranks.items():
        view = views[reading.pid]
        is_there = view.hash_seen_s >= view.moved_at_s and not is_paused(view, scene.now_s)
        collective = collective_at(view.stack, reading.wait) if is_there else ""
        family = _family(reading.pid, views.values())
        found.append(Standing(rank, view, collective, max(one.moved_at_s for one in family)))
    return found


def _family(pid: int, views: Iterable[ProcessView]) -> list[ProcessView]:
    """A process and what it has started; parents come before children."""
    pids, found = {pid}, []
    for view in views:
        if view.reading.pid == pid or view.reading.ppid in pids:
            pids.add(view.reading.pid)
            found.append(view)
    return found


def collective(scene: Scene) -> Verdict | None:
    """Ranks have waited in a collective for some seconds: name the one that is not there, and where it is instead.
    Only a standstill of the missing ranks is an alarm; one that works is waited for, however long."""
    ranks = standing_ranks(scene)
    inside = [one for one in ranks if one.collective]
    gone, size = _gone(scene, ranks), _world_size(ranks)
    num_far = size - len(ranks) - len(gone)
    if not inside or (len(ranks) + len(gone) < 2 and num_far < 1):
        return None
    since_s = max(one.view.moved_at_s for one in inside)
    outside = [one for one in ranks if not one.collective]
    is_cut = bool(scene.state.sample.tree.silent) and not outside and not gone and num_far > 0
    if scene.now_s - since_s < scene.limits.waiting_after_s * (_CUT_SHARE if is_cut else 1.0):
        return None
    if not outside and not gone and any(meeting(one.view.stack) for one in inside):
        return None  # ranks of other machines have not started yet
    if any(scene.now_s - one.moved_at_s < _MOVES_S for one in outside):
        text = f"{_outside_text(outside)}; {_inside_text(inside, scene.now_s - since_s)}"
        pid = outside[0].view.reading.pid
        return Verdict("BUSY", "WAITING_RANKS", since_s, text, frame_of(scene.leader), pid)
    if not outside and not gone and not is_cut and _is_exchanging(scene):
        return None
    if not outside and not gone and num_far > 0:
        return _between_machines(scene, inside)
    return _standstill(scene, inside, outside, gone)


def _gone(scene: Scene, ranks: Sequence[Standing]) -> list[int]:
    """Ranks that were here and have ended. After a change of machines a rank may be elsewhere, or in no world."""
    size = _world_size(ranks)
    known = {one.rank for one in ranks} | {one.rank for one in scene.state.sample.elsewhere or ()}
    return sorted(rank for rank in scene.state.ranks - known if not size or rank < size)


def _world_size(ranks: Sequence[Standing]) -> int:
    return max((one.view.reading.rank.world_size for one in ranks if one.view.reading.rank), default=0)


def _between_machines(scene: Scene, inside: list[Standing]) -> Verdict | None:
    """All ranks of this machine wait for ranks of others. What those do is known where the machines share a folder.
    A rank that works there is waited for; its own supervisor judges it. Whether what was sent there arrives is known
    to the kernel."""
    far, silent = scene.state.sample.elsewhere or (), scene.state.sample.tree.silent
    if not far and not silent:
        return None
    since_s = max(one.view.moved_at_s for one in inside)
    for_s, limit_s = scene.now_s - since_s, max(_LEAST_S, scene.limits.stuck_after_s / 3)
    here, leader = _inside_text(inside, for_s), inside[0].view
    late = sorted({(one.machine, one.age_s) for one in far if one.age_s > _SILENT_S})
    away = [one for one in far if _is_away(one) and one.age_s <= _SILENT_S]
    if late:
        words = ", ".join(f"{name} was last seen {format_duration(age_s)} ago" for name, age_s in late[:_MOST_GROUPS])
        text = f"{words}: that machine, or the network to it, is down; {here}"
    elif silent:
        names = ", ".join(silent[:_MOST_GROUPS])
        text = f"the network between the machines is cut, or {names} is down: what was sent there does not arrive"
        text += f"; {here}"
    elif away:
        one = away[0]
        at = f" at {one.place}" if one.place else ""
        text = f"rank {one.rank} on {one.machine} has not arrived: {one.what}{at}; {here}"
        return Verdict("BUSY", "WAITING_RANKS", since_s, text, frame_of(leader), leader.reading.pid)
    else:
        names = ", ".join(sorted({one.machine for one in far})[:_MOST_GROUPS])
        text = (
            f"all ranks wait for one another, here and on {names}: the network between the machines is cut, or the "
        )
        text += f"ranks call with different shapes, dtypes or groups; {here}"
    frame, pid = frame_of(leader), leader.reading.pid
    if for_s >= limit_s:
        return Verdict("STUCK", "STUCK_RANKS", since_s, text, frame, pid)
    next_in_s = max(1.0, limit_s - for_s)
    text += f"; if nothing changes, an alarm in {format_duration(next_in_s)}"
    return Verdict("WAITING", "WAITING_RANKS", since_s, text, frame, pid, "STUCK", next_in_s)


def _is_away(one: FarRank) -> bool:
    """Whether it is known to be in no collective. One that waits, while its line is not known, may be in one."""
    return not one.is_waiting and (bool(one.place) or "waiting" not in one.what)


def _standstill(scene: Scene, inside: list[Standing], outside: list[Standing], gone: list[int]) -> Verdict:
    since_s = max([one.view.moved_at_s for one in inside] + [one.moved_at_s for one in outside])
    # Between two short sleeps a rank is seen at a lock now and then. It may be polling for something that comes.
    is_napping = any(naps(one.view, scene.now_s) for one in outside)
    for_s, limit_s = scene.now_s - since_s, max(_LEAST_S, scene.limits.stuck_after_s / (1 if is_napping else 3))
    limit_s = min(limit_s, scene.limits.stuck_after_s)
    if gone:
        first = f"{rank_words(gone)} {'has' if len(gone) == 1 else 'have'} ended, and the others wait for it"
        text = f"{first}: {_inside_text(inside, for_s)}"
    elif outside:
        text = f"{_outside_text(outside)}; {_inside_text(inside, for_s)}"
    else:
        text = _mismatch_text(inside, for_s)
    flight = scene.state.flight
    flight = flight if flight is not None and flight.asked_at_s >= since_s else None
    if flight is not None:
        text += f"; flight recorder: {flight.text}"
        text += f"; torch itself gives up after {format_duration(flight.timeout_s)}" if flight.timeout_s else ""
    if scene.state.deadlock is not None:
        text += f"; {scene.state.deadlock.text}"
    proved = _deadlock_of(scene, outside)
    fault = (outside[0] if outside else _at_fault(inside, flight)).view
    pid, frame = fault.reading.pid, frame_of(fault) or frame_of(scene.leader)
    if for_s >= limit_s:
        # A sleep ends by itself, and so may a wait for a disk or a network: these are suspected only.
        ends = ("sleep", "disk", "network", "file")
        is_sure = not is_napping and all(one.view.reading.wait.kind not in ends for one in outside)
        kind: Kind = "STUCK" if is_sure else "SUSPECT"
        label = "DEADLOCK" if proved else "STUCK_RANKS"
        is_final = proved is not None or bool(gone) or (not outside and flight is not None and bool(flight.odd))
        return Verdict(kind, label, since_s, text, frame, pid, deadlock=proved, is_final=is_final)
    next_in_s = max(1.0, limit_s - for_s)
    text += f"; if nothing changes, an alarm in {format_duration(next_in_s)}"
    return Verdict("WAITING", "WAITING_RANKS", since_s, text, frame, pid, "STUCK", next_in_s)


def _deadlock_of(scene: Scene, outside: list[Standing]) -> Deadlock | None:
    """The proved cycle in which a rank stands that has not arrived."""
    found = scene.state.deadlock
    pids = {one.view.reading.pid for one in outside}
    is_theirs = found is not None and found.is_cycle and any(member.pid in pids for member in found.members)
    return found if is_theirs else None


def _is_exchanging(scene: Scene) -> bool:
    """All ranks are in the collective, and bytes move between them: a large one takes its time."""
    rates = scene.state.rates
    return rates.tcp_bytes >= _TRAFFIC_BYTES_PER_S or rates.cpu_s >= _TRAFFIC_CORES or scene.state.is_gpu_working


def _outside_text(outside: Sequence[Standing]) -> str:
    """'rank 1 (pid 4242) has not arrived: it is sleeping at train.py:11 `time.sleep(9)`'."""
    parts = []
    for one in outside[:_MOST_GROUPS]:
        reading = one.view.reading
        doing = describe_wait(effective_wait(one.view.stack, reading.wait)) or "running"
        place = place_text(frame_of(one.view))
        at = f" at {place}" if place else ""
        parts.append(f"rank {one.rank} (pid {reading.pid}) has not arrived: it is {doing}{at}")
    more = len(outside) - _MOST_GROUPS
    return "; ".join(parts) + (f"; and {more} more ranks have not" if more > 0 else "")


def _inside_text(inside: Sequence[Standing], for_s: float) -> str:
    groups = _by_place(inside)
    words = [
        f"{rank_words(one.rank for one in group)} {'has' if len(group) == 1 else 'have'} waited for "
        f"{format_duration(for_s)} in {where}"
        for where, group in groups[:_MOST_GROUPS]
    ]
    return "; ".join(words)


def _by_place(inside: Sequence[Standing]) -> list[tuple[str, list[Standing]]]:
    """The ranks by where they wait, the smallest group first."""
    groups: dict[str, list[Standing]] = {}
    for one in inside:
        groups.setdefault(one.where, []).append(one)
    return sorted(groups.items(), key=lambda entry: (len(entry[1]), entry[1][0].rank))


def _at_fault(ranks: Sequence[Standing], flight: Flight | None) -> Standing:
    """The rank to look at: the one that the recorders name, else one of the smallest group."""
    odd = [one for one in ranks if flight is not None and one.rank in flight.odd]
    return (odd or [one for _, group in _by_place(ranks) for one in group])[0]


def _mismatch_text(inside: Sequence[Standing], for_s: float) -> str:
    groups = _by_place(inside)
    if len(groups) == 1:
        where, called = groups[0][0], inside[0].collective.rpartition(".")[2]
        why = _ONE_SIDED.get(
            called, "they call it with different shapes, dtypes or groups, or one of them has made a call more"
        )
        return f"all {len(inside)} ranks have stood in {where} for {format_duration(for_s)}: {why}"
    parts = [
        f"{rank_words(one.rank for one in group)} wait{'s' if len(group) == 1 else ''} in {where}"
        for where, group in groups[:_MOST_GROUPS]
    ]
    return f"the ranks wait for one another in different calls for {format_duration(for_s)}: {'; '.join(parts)}"

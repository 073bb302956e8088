"""Deadlocks, proved: which threads can never run again, and the cycle in which they wait for each other. Pure.

Each thread is a node. A node that waits without a time limit names its *providers*, the threads that could end the
wait: the owner of a lock, the threads that could fill a queue, the processes with the other end of a pipe. A node is
alive if it does not wait, if its providers are not all known, or if one of them is alive (all of them, where it waits
for all). Whoever is not alive after that can never run again. What is not known counts as alive, so a proof may be
missed but not invented. `standing` reads what this module looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jackline.immutable import immutable
from jackline.supervisor.stacks.dumps import is_own_code
from jackline.supervisor.stacks.inside import Hold, InsideReport, ThreadReport, ThreadWait, leaf_of
from jackline.supervisor.stacks.standing import Standing, StandingThread

Node = tuple[int, int]  # process, thread
_RESULT, _UNKNOWN_HOLDER = "the result of a future", "who holds "
_THREAD_WAITS = ("threads", "idle")
_MOST_LOST = 2


@immutable
class Waiter:
    """A wait without a time limit. `providers` is None where they are not known; `owner_holds` is how the provider
    holds the awaited lock."""

    node: Node
    who: str
    wants: str
    place: str
    providers: frozenset[Node] | None
    needs_all: bool = False
    owner_holds: Hold | None = None
    remark: str = ""
    by_any: bool = False  # any of the providers could end it, and none is known to be the one


@immutable
class Member:
    """One thread of a deadlock, as told to people. `holds` is what the member before it waits for."""

    pid: int
    tid: int
    who: str
    waits_for: str
    at: str
    holds: str = ""
    held_at: str = ""


@immutable
class Deadlock:
    """The way from the first member to the cycle, and the cycle. `is_cycle` is False where a wait has no end because
    nobody is left who could end it."""

    members: tuple[Member, ...]
    is_cycle: bool
    text: str
    has_main: bool  # the main thread of the leading process can never run again
    is_closed: bool = False  # a cycle in which each waits for a certain one: nobody else could have ended it

    @property
    def story(self) -> tuple[str, ...]:
        return tuple(_sentence(member) for member in self.members)

    @property
    def nodes(self) -> frozenset[Node]:
        return frozenset((member.pid, member.tid) for member in self.members)


def find_deadlock(standing: Standing, leader_pid: int, ran: frozenset[Node] = frozenset()) -> Deadlock | None:
    """The deadlock that holds the main thread of `leader_pid`, else any other; None when none is proved. `ran` are
    threads that have run lately: a thread without Python code that runs may be the one that wakes others."""
    waiters = {waiter.node: waiter for waiter in _list_waiters(standing, ran)}
    dead = find_dead(waiters, {(thread.pid, thread.tid) for thread in standing.threads})
    if not dead:
        return None
    main = (leader_pid, leader_pid)
    # An idle worker of a pool is dead only because all others are: those tell the story.
    stories = [_follow(node, waiters, dead) for node in sorted(dead, key=lambda node: (node != main, node))]
    chosen = stories[0] if main in dead else next((story for story in stories if story[1]), stories[0])
    told = _tell(*chosen, waiters, has_main=main in dead)
    more = [] if told.is_closed else [*_lost_children(standing, told), *standing.endings]
    return replace(told, text="; ".join([told.text, *more])) if more else told


def _lost_children(standing: Standing, told: Deadlock) -> list[str]:
    """Processes that have ended, badly or at the other end of a pipe, and whose parent waits for something else."""
    pids = {member.pid for member in told.members}
    is_between = any("pipe" in member.waits_for or "socket" in member.waits_for for member in told.members)
    lost = [one for one in standing.threads if one.ppid in pids and one.ended_by is not None]
    lost = [one for one in lost if one.ended_by or is_between]
    return [f"process {one.pid}, its child, {one.ending}" for one in lost[:_MOST_LOST]]


def find_dead(waiters: Mapping[Node, Waiter], nodes: Iterable[Node]) -> frozenset[Node]:
    """The nodes that can never run again."""
    alive = {node for node in nodes if node not in waiters}
    has_changed = True
    while has_changed:
        has_changed = False
        for node, waiter in waiters.items():
            if node not in alive and _may_end(waiter, alive):
                alive.add(node)
                has_changed = True
    return frozenset(waiters) - alive


def _may_end(waiter: Waiter, alive: set[Node]) -> bool:
    if waiter.providers is None:
        return True
    living = waiter.providers & alive
    return living == waiter.providers if waiter.needs_all else bool(living)


def _follow(node: Node, waiters: Mapping[Node, Waiter], dead: frozenset[Node]) -> tuple[tuple[Node, ...], bool]:
    """The nodes from `node` on, each waiting for the next, up to the one that closes the cycle; whether it does."""
    path = [node]
    while True:
        providers = sorted((waiters[path[-1]].providers or frozenset()) & dead)
        # A provider that waits for something else than its next task is the one to tell about.
        busy = [one for one in providers if waiters[one].wants != "its next task"] or providers
        if not busy:
            return tuple(path), False
        # Whoever waits for a lock with a known owner tells more than a thread that may be woken by many, and one that
        # stands in the person's own code tells more than a housekeeping thread of a library.
        owned = [one for one in busy if waiters[one].owner_holds is not None and one not in path]
        own = [one for one in busy if is_own_code(waiters[one].place.rpartition(":")[0])]
        following = next((one for one in owned or busy if owned or one in path), (own or busy)[0])
        if following in path:
            return tuple(path), True
        path.append(following)


def _tell(path: tuple[Node, ...], is_cycle: bool, waiters: Mapping[Node, Waiter], *, has_main: bool) -> Deadlock:
    last = waiters[path[-1]]
    closes = next((node for node in path if node in (last.providers or ())), None) if is_cycle else None
    dead = [waiter for waiter in waiters.values() if waiter.node not in path]
    members = []
    for number, node in enumerate(path):
        before = last if closes == node else (waiters[path[number - 1]] if number else None)
        hold = before.owner_holds if before else None
        waiter = waiters[node]
        held_at = f"{hold.file}:{hold.line}" if hold and hold.file else ""
        is_held = before is not None and (hold is not None or before.wants.startswith("file lock"))
        holds = before.wants.partition(", held by")[0] if before is not None and is_held else ""
        if before is not None and holds.startswith("lock '") and hold and hold.name and hold.name not in holds:
            # One lock may have two names: first that of the line which took it.
            holds = f"lock '{hold.name}' ({holds.removeprefix('lock ')} in {before.who})"
        who = waiter.who + _alike(waiter, dead)
        members.append(Member(*node, who, waiter.wants, waiter.place, holds, held_at))
    sentences = [_sentence(member) for member in members]
    is_open = is_cycle and any(_is_open(waiters[node]) for node in path[path.index(closes) if closes else 0 :])
    if len(members) == 1 and is_cycle:
        text = f"{_waits(members[0])}, which it holds already{_since(members[0])}: it waits for itself"
    elif is_open:
        text = "; ".join(sentences) + ": no thread that is left could end these waits"
    elif is_cycle:
        text = "; ".join(sentences) + ": they wait for each other"
    else:
        text = "; ".join(sentences) + ": nobody is left who could end this wait"
    remark = next((waiters[node].remark for node in reversed(path) if waiters[node].remark), "")
    is_closed = (is_cycle and not is_open) or (bool(remark) and not remark.startswith(_UNKNOWN_HOLDER))
    return Deadlock(tuple(members), is_cycle, text + (f"; {remark}" if remark else ""), has_main, is_closed)


def _is_open(waiter: Waiter) -> bool:
    """Whether several threads could end its wait, so that it does not wait for a certain one of them."""
    return waiter.by_any and len(waiter.providers or ()) > 1


def _alike(waiter: Waiter, others: Sequence[Waiter]) -> str:
    """' (2 others do the same)' where other threads of the process wait for the same at the same line."""
    known = (waiter.node[0], waiter.wants, waiter.place)
    count = sum((one.node[0], one.wants, one.place) == known for one in others) if waiter.place else 0
    return f" ({count} other{'s do' if count > 1 else ' does'} the same)" if count else ""


def _sentence(member: Member) -> str:
    return (
        f"{member.who} holds {member.holds}{_since(member)} and waits for {member.waits_for} at {member.at}"
        if (member.holds)
        else _waits(member)
    )


def _waits(member: Member) -> str:
    return f"{member.who} waits for {member.waits_for}{f' at {member.at}' if member.at else ''}"


def _since(member: Member) -> str:
    return f" (since {member.held_at})" if member.held_at else ""


# -- who waits for whom ---------------------------------------------------------------------------------------------


def _list_waiters(standing: Standing, ran: frozenset[Node]) -> list[Waiter]:
    tree = _Tree(standing, ran)
    return [waiter for thread in standing.threads if (waiter := tree.waiter_of(thread)) is not None]


class _Tree:
    """The threads and reports of a standing tree, by process."""

    def __init__(self, standing: Standing, ran: frozenset[Node]) -> None:
        self.standing = standing
        self.ran = ran
        self.by_pid: dict[int, list[StandingThread]] = {}
        for thread in standing.threads:
            self.by_pid.setdefault(thread.pid, []).append(thread)
        self.reports = {report.pid: report for report in standing.reports if self._fits(report)}

    def _fits(self, report: InsideReport) -> bool:
        """Whether the kernel knows the threads of the report too; otherwise a live one could be overlooked."""
        known = {thread.tid for thread in self.by_pid.get(report.pid, ())}
        return bool(report.threads) and {thread.tid for thread in report.threads} <= known

    def waiter_of(self, thread: StandingThread) -> Waiter | None:
        """None for a thread that does not wait, or only for a limited time."""
        if not thread.wait.is_endless:
            return None
        report = self.reports.get(thread.pid)
        inside = next((one for one in report.threads if one.tid == thread.tid), None) if report else None
        if report is not None and inside is not None and inside.waits is not None and thread.wait.kind == "lock":
            return self._python_waiter(thread, report, inside, inside.waits)
        return self._kernel_waiter(thread, inside)

    # -- inside one process

    def _python_waiter(
        self, thread: StandingThread, report: InsideReport, inside: ThreadReport, wait: ThreadWait
    ) -> Waiter:
        node, pid = (thread.pid, thread.tid), thread.pid
        who, place = self._who(thread, inside), inside.place
        others = self._python_threads(report) - {node}
        if wait.kind == "join":
            return Waiter(node, who, wait.what, place, frozenset({(pid, wait.target)}) if wait.target else None)
        if wait.kind == "exit":
            stay = {(pid, one.tid) for one in report.threads if not one.is_daemon} - {node}
            return Waiter(node, who, wait.what, place, frozenset(stay), needs_all=True)
        if wait.kind in _THREAD_WAITS:
            providers = None if self._runs_natively(pid) else frozenset(others)
            remark = self._pool_remark(report, inside)
            return Waiter(node, who, wait.what, place, providers, remark=remark, by_any=True)
        if wait.kind == "semaphore":
            return Waiter(node, who, wait.what, place, None)
        if wait.lock.startswith("sem:"):
            holders = self._holders_of(wait.lock)
            held = self._hold_of(wait.lock) if holders else None
            return Waiter(node, who, wait.what, place, holders, owner_holds=held)
        if wait.owner:
            held = wait.held_at or Hold(wait.lock)
            return Waiter(node, who, wait.what, place, frozenset({(pid, wait.owner)}), owner_holds=held)
        if wait.lost_owner:
            remark = f"the thread '{wait.lost_owner}' that took {wait.what} has ended without giving it back"
            return Waiter(node, who, wait.what, place, frozenset(), remark=remark)
        unknown = f"{_UNKNOWN_HOLDER}{wait.what} is not known, but every thread that could release it waits too"
        remark = _fork_remark(report) or (unknown if others else "")
        return Waiter(node, who, wait.what, place, frozenset(others), remark=remark, by_any=True)

    def _pool_remark(self, report: InsideReport, inside: ThreadReport) -> str:
        """Where all threads of a pool wait for results, and tasks that may bring them wait for one of them."""
        same = [one for one in report.threads if inside.pool and one.pool == inside.pool]
        waits = [one.waits.what for one in same if one.waits is not None and one.waits.kind == "threads"]
        if not inside.num_queued or waits != [_RESULT] * len(same):
            return ""
        tasks = f"{inside.num_queued} tasks wait" if inside.num_queued > 1 else "1 task waits"
        every = (
            f"all {len(same)} threads of that pool wait" if len(same) > 1 else "the only thread of that pool waits"
        )
        return f"{every} for results, while {tasks} in its queue for a free one: give inner tasks another pool"

    def _python_threads(self, report: InsideReport) -> set[Node]:
        return {(report.pid, one.tid) for one in report.threads}

    def _runs_natively(self, pid: int) -> bool:
        """Whether a thread without Python code runs, or has run lately: it may call into Python and end the wait. A
        thread that is just starting is one of these."""
        known = self._python_threads(self.reports[pid])
        native = [one for one in self.by_pid[pid] if (pid, one.tid) not in known]
        return any(not one.wait.is_endless or (pid, one.tid) in self.ran for one in native)

    def _holders_of(self, lock: str) -> frozenset[Node] | None:
        """Threads of the processes that hold a multiprocessing lock; empty if its holder has ended."""
        pythons = {thread.pid for thread in self.standing.threads if thread.is_python}
        if not pythons <= set(self.reports):
            return None
        holders: set[Node] = set()
        for report in self.reports.values():
            if lock in report.held:
                precise = {
                    (report.pid, one.tid) for one in report.threads if lock in [hold.lock for hold in one.holds]
                }
                holders |= precise or self._python_threads(report)
        return frozenset(holders)

    def _hold_of(self, lock: str) -> Hold:
        """The line that took a multiprocessing lock, where the `with` block of its holder shows it."""
        held = (hold for report in self.reports.values() for one in report.threads for hold in one.holds)
        return next((hold for hold in held if hold.lock == lock), Hold(lock))

    # -- between processes

    def _kernel_waiter(self, thread: StandingThread, inside: ThreadReport | None) -> Waiter | None:
        wait, node = thread.wait, (thread.pid, thread.tid)
        found = None
        if wait.kind in ("pipe", "local_socket") and thread.link:
            found = self._pipe(thread)
        elif wait.kind == "child":
            found = self._child(thread)
        elif wait.kind == "file_lock":
            found = self._file_lock(thread)
        if found is None:
            return None
        wants, providers = found
        place = inside.place if inside else thread.place
        report = self.reports.get(thread.pid)
        task = next((leaf_of(loop) for loop in report.loops if loop.tid == thread.tid), None) if report else None
        if task is not None:
            wants, place = f"task '{task.name}' of its event loop, which awaits {task.awaits}", task.place
        return Waiter(node, self._who(thread, inside), wants, place, providers)

    def _pipe(self, thread: StandingThread) -> tuple[str, frozenset[Node] | None]:
        ties, link = self.standing.ties, thread.link
        if link.startswith("socket:"):
            peer = ties.peers.get(link)
            pids = ties.readers.get(peer, frozenset()) if peer else frozenset()
        else:
            pids = (ties.readers if thread.wait.is_writing else ties.writers).get(link, frozenset())
        what = "local socket" if link.startswith("socket:") else "pipe"
        whom = ", ".join(str(pid) for pid in sorted(pids - {thread.pid}))
        ends = f" (other end: process {whom})" if whom else ""
        need = f"room in a full {what}" if thread.wait.is_writing else f"data from a {what}"
        return need + ends, self._threads_of(pids, thread) if pids else None

    def _child(self, thread: StandingThread) -> tuple[str, frozenset[Node] | None]:
        number = thread.wait.target.removeprefix("process ")
        children = {one.pid for one in self.standing.threads if one.ppid == thread.pid}
        pids = {int(number)} & children if number.isdigit() else children
        if not pids or any(self.by_pid[pid][0].wait.kind == "zombie" for pid in pids):
            return "the end of a child process", None
        names = ", ".join(f"{pid} ({self.by_pid[pid][0].comm})" for pid in sorted(pids)[:3])
        return f"the end of process {names}", self._threads_of(frozenset(pids), thread)

    def _file_lock(self, thread: StandingThread) -> tuple[str, frozenset[Node] | None] | None:
        locks = self.standing.ties.locks
        wanted = next(
            (lock.number for lock in locks if lock.is_waiting and lock.pid in (thread.pid, thread.tid)), None
        )
        holder = next((lock.pid for lock in locks if lock.number == wanted and not lock.is_waiting), None)
        if holder is None:
            return None
        words = f"file lock '{thread.wait.target}', held by process {holder}"
        if holder == thread.pid:
            others = self._threads_of(frozenset({holder}), thread)
            return words, (others or frozenset({(thread.pid, thread.tid)})) if others is not None else None
        return words, self._threads_of(frozenset({holder}), thread)

    def _threads_of(self, pids: frozenset[int], without: StandingThread) -> frozenset[Node] | None:
        """Threads of these processes that could act; None if one of the processes is not in the tree."""
        found: set[Node] = set()
        for pid in pids:
            if pid not in self.by_pid:
                return None
            report = self.reports.get(pid)
            native = {(pid, one.tid) for one in self.by_pid[pid]}
            found |= self._python_threads(report) | (native & self.ran) if report else native
        return frozenset(found - {(without.pid, without.tid)})

    def _who(self, thread: StandingThread, inside: ThreadReport | None) -> str:
        is_only = len({pid for pid, threads in self.by_pid.items() if threads[0].is_python}) <= 1
        of = "" if is_only and thread.is_python else f" of process {thread.pid} ({self.by_pid[thread.pid][0].comm})"
        if thread.tid == thread.pid:
            return f"the main thread{of}"
        name = inside.name if inside and inside.name else thread.comm
        return f"thread '{name}'{of}"


def _fork_remark(report: InsideReport) -> str:
    if report.fork is None or not report.fork.threads:
        return ""
    places = ", ".join(f"thread '{name}' was at {file}:{line}" for name, file, line in report.fork.threads[:2])
    return (
        f"process {report.pid} was forked from process {report.fork.parent} while {places}, and got its locks as held"
    )

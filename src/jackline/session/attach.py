"""`jackline.attach`: a training loop becomes a run that can be killed at any instant and resumes bit-exactly.

Owns the order of the steps: find the run, start the writer, choose the feed, restore, judge what changed, print the
receipt. Each of these is a module of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

import numpy
import torch

from jackline.checkpoint.engine import EngineSettings
from jackline.checkpoint.state.load import Receipt
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.machine.disk import explain_refusal
from jackline.machine.memory import effective_limit
from jackline.review.rewinds import read_rewinds, rewind_lines
from jackline.rundir.access.secrets import HIDDEN, without_secrets
from jackline.rundir.intent import write_intent
from jackline.rundir.records.seen import read_skipped
from jackline.session.attachment import Attachment
from jackline.session.feeds.choose import choose_feed
from jackline.session.feeds.compared import SeenBatches
from jackline.session.feeds.feed import Feed
from jackline.session.home import (
    BeginsAnew,
    Home,
    command_line,
    is_notebook,
    refuse_to_begin_anew,
    write_ending,
)
from jackline.session.machines.agreement import find_shared_home, make_copier
from jackline.session.memory.gpu import GpuMemory, prepare_gpu
from jackline.session.memory.host import loading_of, settings_to_start_with, use_less
from jackline.session.metrics.pulse import Pulse
from jackline.session.metrics.reporting import Outlook, Reporter, keep_standard_descriptors, say
from jackline.session.metrics.scalars import Scalars
from jackline.session.off import OffRun
from jackline.session.ranks import (
    join_ranks,
    load_together,
    make_engine,
    require_same_program,
    restore_rank,
    settings_for,
    unwrapped,
)
from jackline.session.run import Run
from jackline.session.saving.best import BestKeeper
from jackline.session.saving.changes import (
    Change,
    announce_changes,
    compare_programs,
    copy_group_settings,
    describe_program,
    receipt_lines,
    refuse_unknown_settings,
    start_lines,
    use_new_settings,
)
from jackline.session.saving.exactness import make_exact
from jackline.session.saving.finishing import Finish
from jackline.session.saving.retrained import Retrained
from jackline.session.saving.roundtrip import UNFILLED, refuse_replaced
from jackline.session.saving.saver import Saver
from jackline.session.settings import Settings, split
from jackline.session.stepping import Stepper, find_places
from jackline.session.stopping import StopRequest
from jackline.session.strange import MAX_REWINDS, Strange

_attachments: list[Attachment] = []  # of this process: two would conflict over hooks, signals and the writer


def attach(*, loader: Any = None, **given: Any) -> Run | OffRun:
    """Attach everything that makes up the training, by name; settings (session/settings.py) are keywords too.

        with jackline.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as run:
            for batch in run.steps(total=10_000):
                ...
                run.log(loss=loss)

    Objects need state_dict and load_state_dict, or are generators, tensors, or lists and dicts of these; plain values
    are kept in `run.values`. Restores from the newest whole checkpoint of this run, if there is one.
    """
    is_off = os.environ.get("JACKLINE", "").lower() == "off"
    if not is_off:
        exit_with_its_code()
    settings, state = split(given)
    wrappers = [value for value in state.values() if unwrapped(value) is not value]
    state = {word: unwrapped(value) for word, value in state.items()}
    values = {word: state.pop(word) for word, value in list(state.items()) if _is_plain(value)}
    _refuse_unfillable(state)
    _refuse_lazy(state)
    refuse_unknown_settings(settings.used_new(), state)
    if is_off:
        return OffRun(settings, state, values, loader)
    attached = join(settings, state, values, loader)
    attached.saver.takes_digests = attached.ranks is None
    if attached.ranks is not None:
        attached.ranks.wrappers.extend(wrappers)
    try:
        _restore(attached)
    except BaseException as error:
        attached.saver.engine.close(timeout_s=0.0, linger_s=0.0)
        attached.reporter.close()
        code = error.exit_code if isinstance(error, JacklineError) else 1
        if isinstance(error, BeginsAnew):
            say(str(error))
            write_intent(attached.home.attempt, restart=False, why=error.message)
        with contextlib.suppress(OSError):
            write_ending(attached.home, exit_code=code, cause="exit_code", text=str(error))
        attached.is_over = True
        raise
    return Run(attached)


def exit_with_its_code() -> None:
    """From now on an error of ours that nobody catches ends the process with its own exit code, 3 for a refusal to
    resume. Python's is always 1, which a shell script or a supervisor takes for a crash worth a retry."""
    former = sys.excepthook
    if is_notebook() or getattr(former, "exits_with_code", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        former(kind, error, trace)
        if isinstance(error, JacklineError):
            raise SystemExit(error.exit_code)

    hook.exits_with_code = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def join(settings: Settings, state: dict[str, Any], values: dict[str, Any], loader: Any) -> Attachment:
    """Create the parts. The writer process is started early here: it stays small as long as nothing large exists."""
    _refuse_second(settings)
    ranks = join_ranks(os.environ, state)
    if ranks is not None:
        settings = settings_for(ranks, settings)
    keep_standard_descriptors()
    feed = choose_feed(loader, settings, say, ranks)  # first, because it may raise: then no run is created
    if settings.exact:
        make_exact()
    prepare_gpu()
    home, ranks = find_shared_home(ranks, settings)
    for note in home.notes:
        say(note)
    if home.is_supervised:
        own, settings = settings.mirror, settings.with_supervisor(os.environ)
        if own is not None and own != settings.mirror:
            place = without_secrets(settings.mirror or "")
            if HIDDEN not in own:  # else it is the same one, with its password
                say(f"the mirror is {place} (jackline run --mirror); attach(mirror={own!r}) is not used")
    scalars = Scalars()
    number = ranks.rank if ranks is not None else 0
    reporter = _open_reports(home, number, scalars)  # before the writer is started: it may raise
    fingerprint = describe_program(state, loader, command_line(), {"accumulate": settings.accumulate})
    require_same_program(ranks, fingerprint, find_places(state))
    engine = make_engine(ranks, home.run, _engine_settings(settings))
    rng_state = ProcessRandom()
    whole = {**state, "random": rng_state, "session": None, "values": values}
    saver = Saver(engine, whole, settings)
    stop = StopRequest()
    stop.is_shared = ranks is not None
    pulse = Pulse()

    def before_change() -> None:
        pulse.now("optimizer")
        saver.before_change()

    stepper = Stepper(state, settings.accumulate, before_change)
    attached = Attachment(
        home=home,
        settings=settings,
        stepper=stepper,
        feed=_smaller_feed(feed, home, reporter),
        saver=saver,
        scalars=scalars,
        reporter=reporter,
        stop=stop,
        rng_state=rng_state,
        fingerprint=fingerprint,
        values=values,
        gpu=GpuMemory(state, stepper.optimizers, reporter.event, pulse.now, ranks),
        pulse=pulse,
        best=BestKeeper(settings.keep_best, engine.folder),
        finish=Finish(saver, pulse, stop, settings.wait_for_disk_s),
        seen=SeenBatches(home.run, number, reporter.event),
        ranks=ranks,
    )
    _let_report(attached)
    _attachments.append(attached)
    return attached


def _engine_settings(settings: Settings) -> EngineSettings:
    return EngineSettings(
        keep=settings.keep(),
        mirror=settings.mirror,
        disk_budget=settings.budget(os.environ),
        mirror_patience_s=settings.mirror_patience_s,
        resume_from_mirror=not settings.new,
        leave_out_frozen=settings.leave_out_frozen,
    )


def _let_report(attached: Attachment) -> None:
    """Connect the parts that have something to report with the reporter."""
    reporter, outlook = attached.reporter, Outlook(attached)
    off = partial(reporter.event, "protection_off", is_loud=True, protection="copies")
    make_copier(attached.ranks, attached.saver.engine, off)
    attached.saver.report_to(reporter.event)
    attached.stepper.uncounted.tell = lambda text: reporter.event("uncounted", text, is_loud=True)
    attached.lengths.tell = lambda text: reporter.event("shifted", text, is_loud=True)
    reporter.read_state = outlook.read_state
    reporter.on_tick.append(outlook.look_around)
    attached.strange = Strange(attached.settings.replay_every, attached.settings.on_spike)
    attached.strange.begin(attached)


def _open_reports(home: Home, rank: int, scalars: Scalars) -> Reporter:
    try:
        return Reporter(home.run, rank, scalars)
    except OSError as error:
        raise UsageError(
            f"cannot write to {home.run.path}: {explain_refusal(error, home.run.path)}",
            hint="make room there (df -h, df -i), then start it again: it resumes from its last checkpoint",
        ) from None


def _smaller_feed(feed: Feed, home: Home, reporter: Reporter) -> Feed:
    """After an attempt that ended because of host memory: use fewer workers and less prefetch, and report it."""
    wanted = settings_to_start_with(home.run, home.attempt, loading_of(feed)[0], effective_limit().limit_bytes)
    words = use_less(feed, wanted, can_change_workers=True)
    if words:
        reporter.event("smaller", f"{words}: the attempt before ran out of host memory", is_loud=True, **wanted)
    return feed


def _restore(attached: Attachment) -> None:
    attached.skipped = read_skipped(attached.home.run)
    into = attached.saver.state
    given, rates = dict(into), copy_group_settings(into)
    ranks, engine = attached.ranks, attached.saver.engine
    receipt = load_together(ranks, engine, into)
    refuse_replaced(given, into)
    event = attached.reporter.event
    if receipt is None:
        refuse_to_begin_anew(attached.home, os.environ)
        if attached.home.is_old:
            event("no_checkpoint", "there is no checkpoint yet: from the beginning", is_loud=True)
        for line in start_lines(attached.feed, _how_often(attached.settings)):
            event("started", line, is_loud=True)
        return
    session = into["session"]
    if not isinstance(session, dict):
        raise CannotResume(
            f"{receipt.name} was not written by an attached loop", hint="attach(new=True) starts another run"
        )
    attached.restored = session
    attached.position.epoch, attached.position.batch = int(session["epoch"]), int(session["batch"])
    attached.position.batches = int(session["batches"] if "batches" in session else session["batch"])
    counting = session.get("counting") or {}
    attached.stepper.restore(counting)
    attached.lengths.restore(counting.get("lengths"))
    judge_changes(attached, receipt, session, session["feed"]["kind"])
    words = attached.settings.used_new()
    for text in use_new_settings(into, words, session.get("fingerprint"), attached.fingerprint, rates):
        event("changed", text, is_loud=True)
    attached.feed.restore(session["feed"]["state"])
    attached.gpu.restore(session.get("safe_step"))
    attached.strange.restore(session)
    if ranks is not None and (text := restore_rank(ranks, attached.rng_state, session, receipt.step)):
        event("ranks", text, is_loud=ranks.is_first)
    report_resumed(attached, receipt, session)


def report_resumed(attached: Attachment, receipt: Receipt, session: dict[str, Any]) -> None:
    """The objects are filled: take up the checkpoint's counts, print the receipt, compare what is trained again."""
    event = attached.reporter.event
    attached.stepper.go_on_from(receipt.step)
    attached.saver.last_step = receipt.step
    attached.saver.last_at_s = receipt.restored.manifest.created_at_s
    told = rewind_lines(read_rewinds(attached.home.run), MAX_REWINDS)
    for line in (*receipt_lines(receipt, attached.feed, session), *told):
        event("resumed", line, is_loud=True, step=receipt.step)
    if attached.ranks is not None and not attached.skipped.ranges:
        return  # a rank's numbers of before are about another share of the data if their number has changed
    if attached.skipped.ranges:
        skipped = attached.skipped
        line = f"  left out: the batches {skipped} of the run ({skipped.origin}); losses are not compared"
        event("resumed", line, is_loud=True, step=receipt.step)
        return
    retrained = Retrained(attached.home.run, 0, receipt.step, event)
    attached.reporter.on_lines.append(retrained.look)
    attached.saver.on_state = retrained.look_at_state


def judge_changes(attached: Attachment, receipt: Receipt, session: dict[str, Any], saved_kind: str | None) -> None:
    """Report what has changed since the checkpoint; raise CannotResume if one change forbids resuming."""
    words = attached.settings.used_new()
    changes = compare_programs(session.get("fingerprint"), attached.fingerprint, used=words)
    changes += [Change("versions", text) for text in receipt.changes]
    kind = attached.feed.kind
    if saved_kind not in (None, kind):
        changes.append(Change("data", f"the loader was {saved_kind} and is {kind}: its position cannot be used"))
    verdicts = attached.settings.verdicts()
    if attached.home.is_supervised and verdicts["arguments"] == "refuse":
        verdicts["arguments"] = "warn"  # whoever started the run was asked about these already
    announce_changes(
        changes,
        verdicts,
        lambda text: attached.reporter.event("changed", text, is_loud=True),
    )


def _how_often(settings: Settings) -> str:
    from jackline.units import format_duration

    words = []
    if settings.save_every_steps is not None:
        words.append(f"every {settings.save_every_steps} steps")
    if settings.save_every_s is not None:
        words.append(f"every {format_duration(settings.save_every_s)}")
    return " and ".join(words) or "automatically (30 s to 15 min apart, under 0.5 % of the time)"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | numpy.generic)


def _refuse_lazy(state: Mapping[str, Any]) -> None:
    """A lazy module has no tensors to restore into before its first forward pass."""
    for word, value in state.items():
        if not isinstance(value, torch.nn.Module):
            continue
        tensors = [*value.named_parameters(), *value.named_buffers()]
        for name, _ in [one for one in tensors if torch.nn.parameter.is_lazy(one[1])]:
            raise UsageError(
                f"{word}.{name} has no shape yet: it is part of a lazy module",
                hint="run one batch through the model first, then build the optimizer and attach()",
            )


def _refuse_unfillable(state: Mapping[str, Any]) -> None:
    """An immutable object cannot be restored in the caller's variable, and would silently keep its first contents."""
    for word, value in state.items():
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, tuple | frozenset) or _is_plain(part) for part in parts):
            raise UsageError(
                f"{word} is a {type(value).__name__}: it cannot be restored in your own variable", hint=UNFILLED
            )


def _refuse_second(settings: Settings) -> None:
    ours = [one for one in _attachments if one.pid == os.getpid()]
    for one in ours:
        if not one.is_over:
            raise UsageError(
                f"this process is attached to run '{one.name}' already",
                hint="one run at a time: put all objects into one attach(), or leave its `with` block first",
            )
    if ours and settings.name is None and not settings.new and not is_notebook():
        raise UsageError(
            "attach() a second time in one process needs a name",
            hint=f"attach(name=...); the first was run '{ours[0].name}'",
        )

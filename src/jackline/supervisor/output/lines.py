"""Counters in plain lines: 'step 120/1000', '| epoch 1 | 20/ 249 batches |', 'iter 450: loss 2.1', a JSON record.

Owns which words count and how an epoch and the batches in it stand together. Does not own: bars (bars.py), metrics
(numbers.py), formats that nobody knows (learned.py), nor what the counters say about the whole run (journey.py).
"""

from __future__ import annotations

import re
from dataclasses import replace

from jackline.supervisor.output.bars import parse_bar, parse_known_bar, time_left
from jackline.supervisor.output.numbers import MEASURED, read_record
from jackline.supervisor.output.progress import MAX_TEXT, Progress

_WORDS = r"global[_ ]?steps?|steps?|iterations?|iters?|updates?|(?:mini-?)?batch(?:es)?|epochs?|episodes?|rounds?"
_COUNT = r"\d[\d,_]*(?:\.\d+)?"
# An underscore is no word boundary, so that 'max_steps=1000' and 'num_epochs: 3' do not count anything.
_OF = re.compile(
    rf"(?<![\w-])(?P<word>{_WORDS})(?:\(\w{{1,12}}\))?\s*[:=#]?\s*[\[(]?\s*(?P<done>{_COUNT})\s*(?:/|\bof\b)\s*"
    r"(?P<total>\d[\d,_]*)\b",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    rf"(?<![\w/.])(?P<done>{_COUNT})\s*(?:/|\bof\b)\s*(?P<total>\d[\d,_]*)\s+(?P<word>{_WORDS})\b", re.IGNORECASE
)
_AT = re.compile(
    r"(?<![\w-])(?P<word>global[_ ]?step|steps?|iteration|iter|update|epoch|episode|round|batch)\b\s*[:=#]?\s*\[?\s*"
    r"(?P<done>\d[\d,_]*)(?![\d.]*[\w%])(?!\s*/)",
    re.IGNORECASE,
)
# 'Train Epoch: 1 [640/60000 (1%)]', 'Epoch: [0][ 10/5005]', 'Epoch(train) [1][ 50/7330]', 'epoch 001:  10 / 200'.
_EPOCH_PART = re.compile(
    r"(?<![\w-])epoch\b(?:\(\w{1,12}\))?[:\s#=]*\[?\s*(?P<epoch>\d+)(?!\d)(?:\]\s*|\s*[:,|]\s*|\s+)\[?\s*(?P<done>\d+)\s*/\s*"
    r"(?P<total>\d+)\b(?!\s*[-/])",
    re.IGNORECASE,
)
# timm: 'Train: 0 [  50/1251 (  4%)]'.
_TRAIN_PART = re.compile(r"^\W*Train: (?P<epoch>\d+) \[\s*(?P<done>\d+)/(?P<total>\d+)\s*\(\s*\d+%\)")
# The CIFAR tutorial of PyTorch: '[2,  4000] loss: 1.839'; its DCGAN tutorial: '[0/5][50/1583]<tab>Loss_D: 1.2'.
_EPOCH_BATCH = re.compile(r"^\W{0,3}\[\s*(?P<epoch>\d+),\s*(?P<done>\d+)\]\s*\w*\s?loss\b", re.IGNORECASE)
# Swin: 'Train: [2/300][10/1251]', DINO: 'Epoch: [3/100]  [ 10/1251]'.
_EPOCHS_BATCHES = re.compile(r"\[\s*(?P<epoch>\d+)/(?P<epochs>\d+)\]\s*\[\s*(?P<done>\d+)/(?P<total>\d+)\]")
# ESPnet: '2epoch:train:51-100batch: iter_time=0.1'.
# 'Ep 09/12', an epoch only around the batches of a line: where somebody learns by playing, it is an episode.
_SHORT_EPOCH = re.compile(r"(?<![\w-])eps?\s*[:=#.]?\s*(?P<done>\d+)\s*/\s*(?P<total>\d+)\b", re.IGNORECASE)
_EPOCH_RANGE = re.compile(r"(?<!\w)(?P<epoch>\d+)epoch:train:\d+-(?P<done>\d+)batch\b")
_PAIR = re.compile(r"(?<![\d/])\d+\s*/\s*\d+(?![\d/])")
_ASIDE = re.compile(r"(?:^\W*|epoch\(|(?<=\])\s*)(test|val|valid|validation|eval|evaluation)\b", re.IGNORECASE)
# Its quickstart: 'loss: 2.253  [12864/60000]'.
_BRACKETS = re.compile(r"\[\s*(?P<done>\d+)\s*/\s*(?P<total>\d+)\s*\]")
# XGBoost and LightGBM: '[10]<tab>train-rmse:0.123'.
_ROUND = re.compile(r"^\[(?P<done>\d+)\]\t\S")
_MAYBE = re.compile(
    r"step|iter|epoch|batch|update|episode|round|^\W*Train: \d|^\[\d+\]\t|\[\s*\d+\s*[,/]\s*\d+\]", re.IGNORECASE
)
_RECORD_STEPS = ("global_step", "trainer/global_step", "step", "steps", "num_updates", "iteration", "iter", "update")
_RECORD_TOTALS = ("max_steps", "total_steps", "num_steps", "max_iters")
_OF_ALL = ("total_", "max_", "num_")  # before the name of the counter: 'update' of 'total_updates'
# What stands around a series of steps: cross-validation, a search. The steps of one are not those of the run.
_OUTER = re.compile(
    r"(?<![\w-])(?P<word>fold|trial|split|member|restart|repeat|seed|task|chain)\s*[:=#]?\s*(?P<number>\d+)\b", re.I
)


def parse_line(text: str) -> Progress | None:
    """A plain line such as 'step 120/1000' or 'iter 450: loss 2.1'."""
    text = text[:MAX_TEXT]
    if (
        "%|" in text
        or "━" in text
        or ("[" in text and "]" in text and "/" in text and ("it/s" in text or "==" in text))
    ):
        known = parse_known_bar(text)
        if known:
            return known
    if not _MAYBE.search(text):
        return None
    return _with_time_left(_record(text) or _in_brackets(text) or _counted(text), text)


def _with_time_left(found: Progress | None, text: str) -> Progress | None:
    """What a trainer says itself about its end: 'eta: 1:23:45  iter: 19'. In an epoch it may be the epoch's."""
    if found is None or found.eta_s is not None or found.of != "run":
        return found
    if found.total is not None and (found.epoch is not None or found.unit == "epochs"):
        return found
    return replace(found, eta_s=time_left(text) or None)


def parse_redrawn(text: str) -> Progress | None:
    r"""A refresh of something drawn in place: a bar, or a line such as print(f"\riter {i}/300", end="")."""
    return parse_bar(text) or parse_line(text)


def word_counter(text: str) -> tuple[int, str] | None:
    """'[debug] step 2: shapes ok': where a counter without any metric begins, and its unit. It counts only where such
    lines repeat (learned)."""
    match = _finest(list(_AT.finditer(text[:MAX_TEXT])))
    return (match.start("done"), _unit(match["word"])) if match is not None else None


def _in_brackets(text: str) -> Progress | None:
    whole = _EPOCHS_BATCHES.search(text) if "loss" in text.lower() else None
    if whole is not None and float(whole["done"]) <= float(whole["total"]):
        done, total = float(whole["done"]), float(whole["total"])
        epoch, epochs = float(whole["epoch"]), float(whole["epochs"])
        return Progress("", done, total, "batches", None, None, "line", "epoch", epoch, epochs)
    open_ended = _EPOCH_BATCH.match(text) or _EPOCH_RANGE.search(text)
    if open_ended is None:
        return None
    done, epoch = float(open_ended["done"]), float(open_ended["epoch"])
    return Progress("", done, None, "batches", None, None, "line", "epoch", epoch)


def _counted(text: str) -> Progress | None:
    part = _EPOCH_PART.search(text) or _TRAIN_PART.search(text)
    found = [match for pattern in (_OF, _BEFORE) for match in pattern.finditer(text)]
    found = [match for match in found if _float(match["done"]) <= _float(match["total"])]
    epoch = next((match for match in found if _is_epoch(match["word"])), None)
    finest = next((match for match in found if not _is_epoch(match["word"])), None)
    if finest is not None:
        short = _SHORT_EPOCH.search(text, 0, finest.start()) if epoch is None else None
        epoch = short if short is not None and _float(short["done"]) <= _float(short["total"]) else epoch
        done, total, unit = _float(finest["done"]), _float(finest["total"]), _unit(finest["word"])
        outer = _OUTER.search(text, 0, finest.start())
        if outer is not None and epoch is None:
            return Progress(
                f"{outer['word'].lower()} {outer['number']}", done, total, unit, None, None, "line", "part"
            )
        return _within(text, Progress("", done, total, unit, None, None, "line"), epoch)
    if part is not None and float(part["done"]) <= float(part["total"]):
        if (aside := _ASIDE.search(text[: part.start("epoch")])) is not None:
            return _aside(aside, part)
        done, total, number = float(part["done"]), float(part["total"]), float(part["epoch"])
        return Progress(f"epoch {number:g}", done, total, "", None, None, "line", "epoch", number)
    bare = _at(text) if MEASURED.search(text) else None
    if bare is not None and bare.unit != "epochs":
        return _within(text, bare, epoch)
    if epoch is not None:
        done, total = _float(epoch["done"]), _float(epoch["total"])
        return Progress("", done, total, "epochs", None, None, "line", "run", done, total)
    return bare or _behind_numbers(text)


def _behind_numbers(text: str) -> Progress | None:
    found = _BRACKETS.search(text) if MEASURED.search(text) else None
    if found is None or float(found["done"]) > float(found["total"]) or len(_PAIR.findall(text)) > 1:
        return None  # of two pairs nobody knows which is around the other: learned.py may find out
    if (aside := _ASIDE.search(text[: found.start()]) or _ASIDE.match(text, found.end())) is not None:
        return _aside(aside, found)
    return Progress("", float(found["done"]), float(found["total"]), "", None, None, "line")


def _aside(named: re.Match[str], counted: re.Match[str]) -> Progress:
    """The batches of a validation between those of the training: 'Test: [  10/48]', 'Epoch(val) [3][ 10/500]'."""
    done, total = float(counted["done"]), float(counted["total"])
    return Progress(named[1].lower(), done, total, "", None, None, "line", "part")


def _within(text: str, finest: Progress, epoch: re.Match[str] | None) -> Progress:
    """The counter inside an epoch, where the line names one: 'Epoch [3/10], Step [100/600]'."""
    if finest.unit.startswith("global"):
        return finest
    number: float | None = None
    epochs: float | None = None
    if epoch is not None:
        number, epochs = _float(epoch["done"]), _float(epoch["total"])
    else:
        at = next((match for match in _AT.finditer(text) if _is_epoch(match["word"])), None)
        number = _float(at["done"]) if at else None
    if number is None:
        return finest
    is_part = finest.total is not None
    return Progress(
        finest.phase,
        finest.done,
        finest.total,
        finest.unit,
        None,
        None,
        "line",
        "epoch" if is_part else "run",
        number,
        epochs,
    )


def _at(text: str) -> Progress | None:
    match = _finest(list(_AT.finditer(text))) or _ROUND.search(text)
    if match is None:
        return None
    word = match.groupdict().get("word", "round") or "round"
    done = _float(match["done"])
    number = done if _is_epoch(word) else None
    return Progress("", done, None, _unit(word), None, None, "line", "run", number)


def _record(text: str) -> Progress | None:
    """A line of JSON or of a printed dict: {'loss': 2.1, 'learning_rate': 5e-05, 'epoch': 0.5}."""
    record = read_record(text)
    if record is None:
        return None
    epoch = record.get("epoch")
    step = next((record[name] for name in _RECORD_STEPS if name in record), None)
    total = next((record[name] for name in _RECORD_TOTALS if name in record), None)
    if total is None:
        counter = next((name for name in _RECORD_STEPS if name in record), "").rstrip("s")
        names = (f"{before}{counter}{end}" for before in _OF_ALL for end in ("s", ""))
        total = next((record[name] for name in names if counter and name in record), None)
    if step is not None and step >= 0:
        total = total if total is not None and total >= step else None
        return Progress("", step, total, "steps", None, None, "line", "run", epoch)
    if epoch is None or epoch < 0:
        return None
    return Progress("", epoch, None, "epochs", None, None, "line", "run", epoch)


def _finest(found: list[re.Match[str]]) -> re.Match[str] | None:
    """The fastest of several counters in a line: 'Epoch 3/10, step 120/1000' is at step 120."""
    return next((one for one in found if not _is_epoch(one["word"])), found[0] if found else None)


def _is_epoch(word: str) -> bool:
    return word.lower().startswith("epoch")


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _unit(word: str) -> str:
    word = word.lower().replace("_", " ")
    if word.startswith("iter"):
        return "iterations"
    if "batch" in word:
        return "batches"
    return "steps" if "step" in word else word.rstrip("s") + "s"

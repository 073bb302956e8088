"""How far a program says it is: bars, step lines and our own protocol, read from its output.

Owns: recognising them, and the pace and time left that follow. Conservative: a number that only looks like
progress is worse than none. Does not own: the stream (splitter.py) or what is shown (cli).
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

PROTOCOL = "::jackline "
MAX_TEXT = 2000  # no bar is longer; a regex never sees more than this

Source = Literal["bar", "protocol", "line"]


@dataclass(frozen=True)
class Progress:
    """`done` of `total` `unit`s of one phase. None is 'not known'."""

    phase: str
    done: float
    total: float | None
    unit: str
    rate_per_s: float | None
    eta_s: float | None
    source: Source


_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_SIZE = rf"({_NUMBER})\s?([kKMGTP]?i?)"
_CLOCK = r"(?:\d+ days?, ?)?\d+(?::\d\d){1,2}"
_TQDM = re.compile(
    rf"(?P<phase>.*?)\s*(?P<percent>\d{{1,3}})%\|[^|]*\|\s*(?P<done>{_NUMBER})(?P<done_step>[kMGTP]?)[A-Za-z]*\s?/\s?"
    rf"(?P<total>{_NUMBER})(?P<total_step>[kMGTP]?)(?P<unit>[A-Za-z]*)\s*"
    rf"\[(?P<elapsed>{_CLOCK})<(?P<eta>{_CLOCK}|\?)(?:,\s*(?P<rate>[^,\]]+))?"
)
_TQDM_OPEN = re.compile(
    rf"(?:(?P<phase>.*?):\s+)?(?P<done>{_NUMBER})(?P<done_step>[kMGTP]?)\s?(?P<unit>[A-Za-z]+)\s+"
    rf"\[(?P<elapsed>{_CLOCK})(?:,\s*(?P<rate>[^,\]]+))?"
)
_RATE = re.compile(
    rf"({_NUMBER})\s?([kKMGTP]?i?)\s?([A-Za-z]*)/s|({_NUMBER})\s?s/([A-Za-z]+)|({_NUMBER})\s?(ms|us)/([A-Za-z]+)"
)
_KERAS = re.compile(rf"\s*({_NUMBER})/({_NUMBER})\s+(?:\[[=>.]+\]|[━╸╺\x20]+\s)(?P<rest>.*)")
_KERAS_ETA = re.compile(r"ETA:\s*(?:(\d+):)?(?:(\d+):)?(\d+)s?")
_BAR_OF = re.compile(
    rf"(?P<phase>.*?)\s*[━╸╺█▏▎▍▌▋▊▉#=>-]{{4,}}[━╸╺█▏▎▍▌▋▊▉#=>.\s-]*\s(?:(?P<percent>\d{{1,3}}(?:\.\d+)?)%)?.*?"
    rf"{_SIZE}[A-Za-z]*\s?/\s?{_SIZE}(?P<unit>[A-Za-z]*)"
)
_WGET = re.compile(rf"(?P<phase>\S*)\s+(\d{{1,3}})%\s?\[[=>+\s]*\]\s+{_SIZE}B?(?P<rest>.*)")
_CURL = re.compile(
    rf"\s*(\d{{1,3}})\s+{_SIZE}\s+(\d{{1,3}})\s+{_SIZE}\s.*?\s(?P<eta>{_CLOCK}|--:--:--)\s+{_SIZE}\s*$"
)
_PERCENT = re.compile(r"(?P<phase>.*?)(?<![\d.])(?P<percent>\d{1,3}(?:\.\d+)?)\s?%")
_ETA = re.compile(rf"(?:eta|ETA|remaining)[\s:]+({_CLOCK}|(?:\d+h)?\s?(?:\d+m)?\s?\d+s)|\s(-?{_CLOCK})\s*$")
_BAR_SIGNS = re.compile(r"[━╸╺█▏▎▍▌▋▊▉░▒▓|\[\]()#=>*•·…⠀-⣿<-]+")
_STEPS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}

_WORDS = r"global[_ ]step|steps?|iterations?|iters?|updates?|batch(?:es)?|epochs?"
_OF = re.compile(
    rf"\b(?P<word>{_WORDS})\b\s*[:=#]?\s*[\[(]?\s*(?P<done>\d[\d,]*(?:\.\d+)?)\s*(?:/|\bof\b)\s*(?P<total>\d[\d,]*)\b",
    re.IGNORECASE,
)
_AT = re.compile(
    r"\b(?P<word>global[_ ]step|step|iteration|iter|update)\b\s*[:=#]?\s*\[?(?P<done>\d[\d,]*)(?![\d.]*[\w%])",
    re.IGNORECASE,
)
_MEASURED = re.compile(
    r"\b(?:\w*loss|lr|learning_rate|ppl|perplexity|acc(?:uracy)?|grad_norm|tok/s|tokens/s)\b", re.I
)
_HF_RECORD = re.compile(r"^\s*\{'[\w/]+': .*'epoch': '?(?P<done>\d+(?:\.\d+)?)'?.*\}\s*$")
_MAYBE_LINE = re.compile(r"step|iter|epoch|batch|update", re.IGNORECASE)

_PAIR = re.compile(r"""\s*([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"']*)(?=\s|$)""")


def parse_bar(text: str) -> Progress | None:
    """A refresh of a bar (ended by CR): tqdm, rich, pip, wget, curl, keras, or any percentage."""
    text = text[:MAX_TEXT].rstrip()
    return parse_known_bar(text) or _generic(text)


def parse_known_bar(text: str) -> Progress | None:
    """A bar whose shape is certain, so that it may also be looked for in ordinary lines."""
    text = text[:MAX_TEXT].rstrip()
    if "%|" in text:
        return _tqdm(text)
    if "[" in text and "s" in text:
        found = _tqdm_open(text) or _keras(text) or _wget(text)
        if found:
            return found
    if "━" in text or "█" in text or "===" in text or "###" in text:
        return _keras(text) or _bar_of(text)
    return _curl(text)


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
    if not _MAYBE_LINE.search(text):
        return None
    return _of(text) or _hf_record(text) or _at(text)


def parse_protocol(text: str) -> Progress | None:
    """`::jackline phase=tokenise done=120 total=1000 unit=docs`; None when it is not exactly that."""
    if not text.startswith(PROTOCOL) or len(text) > MAX_TEXT:
        return None
    pairs = _read_pairs(text[len(PROTOCOL) :].rstrip())
    if pairs is None or not ({"phase", "done"} & set(pairs)):
        return None
    try:
        done = _finite(pairs.get("done", "0"))
        total = _finite(pairs["total"]) if pairs.get("total") else None
        rate = _finite(pairs["rate_per_s"]) if pairs.get("rate_per_s") else None
        eta = _finite(pairs["eta_s"]) if pairs.get("eta_s") else None
    except ValueError:
        return None
    return Progress(pairs.get("phase", ""), done, total, pairs.get("unit", ""), rate, eta, "protocol")


class Pace:
    """Turns successive reports into a rate and a time left.

    The rate is the median of the slopes over half the window (Theil-Sen): one compile or one pause for an
    evaluation does not spoil it, yet pauses that recur are in it.
    """

    def __init__(self, *, num_samples: int = 40, spacing_s: float = 0.5) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=num_samples)
        self._spacing_s = spacing_s
        self._last: Progress | None = None

    def update(self, progress: Progress, now_s: float) -> Progress:
        """The report with what it did not say itself filled in, where that can be known."""
        if not self._goes_on(progress):
            self._samples.clear()
        self._last = progress
        if not self._samples or now_s - self._samples[-1][0] >= self._spacing_s:
            self._samples.append((now_s, progress.done))
        rate = progress.rate_per_s if progress.rate_per_s is not None else self.rate_per_s
        eta = progress.eta_s if progress.eta_s is not None else _eta(progress, rate)
        return replace(progress, rate_per_s=rate, eta_s=eta)

    @property
    def rate_per_s(self) -> float | None:
        samples = list(self._samples)
        if len(samples) < 2:
            return None
        reach = max(1, len(samples) // 2)
        slopes = [
            (after[1] - before[1]) / (after[0] - before[0])
            for before, after in zip(samples, samples[reach:], strict=False)
            if after[0] > before[0]
        ]
        return statistics.median(slopes) if slopes else None

    def _goes_on(self, progress: Progress) -> bool:
        last = self._last
        return (
            last is not None
            and (last.phase, last.unit, last.total) == (progress.phase, progress.unit, progress.total)
            and progress.done >= last.done
        )


def _tqdm(text: str) -> Progress | None:
    match = _TQDM.match(text)
    if match is None:
        # bar_format='{l_bar}{bar}|' and friends: the percentage is still certain.
        percent = re.match(r"(?P<phase>.*?)\s*(?P<percent>\d{1,3})%\|", text)
        return _percent(percent["phase"], percent["percent"]) if percent else None
    done = _scaled(match["done"], match["done_step"])
    total = _scaled(match["total"], match["total_step"])
    rate, unit = _rate(match["rate"] or "")
    eta = None if match["eta"] == "?" else _seconds(match["eta"])
    return Progress(_words(match["phase"]), done, total, unit or match["unit"], rate, eta, "bar")


def _tqdm_open(text: str) -> Progress | None:
    match = _TQDM_OPEN.match(text)
    if match is None:
        return None
    rate, unit = _rate(match["rate"] or "")
    done = _scaled(match["done"], match["done_step"])
    return Progress(_words(match["phase"] or ""), done, None, unit or match["unit"], rate, None, "bar")


def _keras(text: str) -> Progress | None:
    match = _KERAS.match(text)
    if match is None:
        return None
    rest = match["rest"]
    clock = _KERAS_ETA.search(rest)
    eta: float | None = None
    if clock:
        eta = 0.0
        for part in clock.groups():
            eta = eta * 60 + float(part or 0)
    rate, _ = _rate(rest)
    return Progress("", _float(match[1]), _float(match[2]), "steps", rate, eta, "bar")


def _bar_of(text: str) -> Progress | None:
    """rich with a count, pip: '━━━━ 12.3/45.6 MB 3.2 MB/s eta 0:00:10'."""
    match = _BAR_OF.match(text)
    if match is None:
        return None
    done_number, done_step, total_number, total_step = match.group(3, 4, 5, 6)
    unit = match["unit"]
    step = total_step or (unit[0] if len(unit) > 1 and unit[0] in "kMGT" and unit[-1] == "B" else "")
    rest = text[match.end() :]
    rate, rate_unit = _rate(rest)
    unit = "B" if step and (unit.endswith("B") or unit == "") and rate_unit in ("B", "") else (rate_unit or unit)
    done, total = _scaled(done_number, done_step or step), _scaled(total_number, step)
    return Progress(_words(match["phase"]), done, total, unit, rate, _eta_text(rest), "bar")


def _wget(text: str) -> Progress | None:
    match = _WGET.match(text)
    if match is None:
        return None
    done = _scaled(match[3], match[4])
    percent = float(match[2])
    rate, _ = _rate(match["rest"])
    total = done * 100 / percent if percent else None
    return Progress(match["phase"], done, total, "B", rate, _eta_text(match["rest"]), "bar")


def _curl(text: str) -> Progress | None:
    match = _CURL.match(text)
    if match is None:
        return None
    eta = None if match["eta"].startswith("-") else _seconds(match["eta"])
    rate = _scaled(match[8], match[9])
    return Progress("", _scaled(match[5], match[6]), _scaled(match[2], match[3]) or None, "B", rate, eta, "bar")


def _generic(text: str) -> Progress | None:
    match = _PERCENT.match(text)
    return None if match is None else _percent(match["phase"], match["percent"], _eta_text(text[match.end() :]))


def _percent(phase: str, percent: str, eta_s: float | None = None) -> Progress | None:
    value = float(percent)
    return Progress(_words(phase), value, 100.0, "%", None, eta_s, "bar") if value <= 100 else None


def _of(text: str) -> Progress | None:
    """The finest counter of a line that has several: 'Epoch 3/10, step 120/1000' is at step 120."""
    found = list(_OF.finditer(text))
    if not found:
        return None
    match = next((one for one in found if not one["word"].lower().startswith("epoch")), found[0])
    done, total = _float(match["done"]), _float(match["total"])
    return Progress("", done, total, _unit(match["word"]), None, None, "line") if done <= total else None


def _at(text: str) -> Progress | None:
    match = _AT.search(text)
    if match is None or not _MEASURED.search(text):
        return None
    return Progress("", _float(match["done"]), None, _unit(match["word"]), None, None, "line")


def _hf_record(text: str) -> Progress | None:
    match = _HF_RECORD.match(text)
    return Progress("", float(match["done"]), None, "epochs", None, None, "line") if match else None


def _read_pairs(text: str) -> dict[str, str] | None:
    pairs: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None:
            return None
        value = match[2]
        if value[:1] == '"':
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        elif value[:1] == "'":
            value = value[1:-1]
        pairs[match[1]] = value
        at = match.end()
    return pairs


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _rate(text: str) -> tuple[float | None, str]:
    """'36.1it/s', '2.3s/it', '12.0MB/s', '35ms/step' -> units a second, unit."""
    match = _RATE.search(text)
    if match is None:
        return None, ""
    if match[1]:
        return _scaled(match[1], match[2]), match[3]
    seconds = _float(match[4]) if match[4] else _float(match[6]) * (1e-3 if match[7] == "ms" else 1e-6)
    return (1 / seconds if seconds else None), match[5] or match[8] or ""


def _scaled(number: str, step: str) -> float:
    factor = _STEPS[step[:1]]
    if step.endswith("i"):
        factor = 1024.0 ** "kMGTP".index(step[0].replace("K", "k")) * 1024
    return _float(number) * factor


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def _seconds(clock: str) -> float:
    days, _, rest = clock.rpartition("day")
    total = 0.0
    for part in rest.lstrip("s, ").split(":"):
        total = total * 60 + float(part)
    return total + (86400 * float(days) if days.strip() else 0)


def _eta_text(text: str) -> float | None:
    match = _ETA.search(text)
    if match is None:
        return None
    words = (match[1] or match[2]).lstrip("-")
    if ":" in words:
        return _seconds(words)
    return sum(
        float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", words)
    )


def _eta(progress: Progress, rate: float | None) -> float | None:
    if progress.total is None or not rate or rate <= 0:
        return None
    return max(0.0, progress.total - progress.done) / rate


def _words(text: str) -> str:
    return " ".join(_BAR_SIGNS.sub(" ", text).split()).rstrip(":").strip()[:80]


def _unit(word: str) -> str:
    word = word.lower().replace("_", " ")
    if word.startswith("iter"):
        return "iterations"
    if word.startswith("batch"):
        return "batches"
    return "steps" if "step" in word else word.rstrip("s") + "s"

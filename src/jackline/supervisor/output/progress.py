"""The progress that a program reports in its output: bars, step lines and our own protocol.

Owns: recognising them, and the rate and time left that follow. Conservative: a number that only looks like
progress is worse than none. Does not own: the stream (splitter.py) or what is shown (cli).
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

PROTOCOL = "::jackline "
_MAX_SERIES = 16
MAX_TEXT = 1000  # no bar is longer; a regex never sees more than this

Source = Literal["bar", "protocol", "line"]


@dataclass(frozen=True)
class Progress:
    """`done` of `total` `unit`s of one phase. None means unknown."""

    phase: str
    done: float
    total: float | None
    unit: str
    rate_per_s: float | None
    eta_s: float | None
    source: Source


_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_SIZE = rf"({_NUMBER})\s?((?:[kKMGTP](?:i(?=B))?)?)"
_CLOCK = r"(?:\d+ days?, ?)?\d+(?::\d\d){1,2}"
# Every pattern is anchored or a simple search, so that no text can make matching slow.
_TQDM = re.compile(
    rf"%\|[^|]*\|\s*(?P<done>{_NUMBER})(?P<done_step>[kMGTP]?)[A-Za-z]*\s?/\s?"
    rf"(?P<total>{_NUMBER})(?P<total_step>[kMGTP]?)(?P<unit>[A-Za-z]*)\s*"
    rf"\[{_CLOCK}<(?P<eta>{_CLOCK}|\?)(?:,\s*(?P<rate>[^,\]]+))?"
)
_TQDM_PERCENT = re.compile(r"\d{1,3}$")
_TQDM_OPEN = re.compile(
    rf"(?P<done>{_NUMBER})(?P<done_step>[kMGTP]?)\s?(?P<unit>[A-Za-z]+)\s+\[{_CLOCK}(?:,\s*(?P<rate>[^,\]]+))?[,\]]"
)
_RATE = re.compile(
    rf"(?:{_SIZE}|\?)\s?(?P<unit>[A-Za-z]*)/s\b|({_NUMBER})\s?s/(?P<per>[A-Za-z]+)|({_NUMBER})\s?(ms|us)/(?P<each>[A-Za-z]+)"
)
_KERAS = re.compile(rf"\s*({_NUMBER})/({_NUMBER})\s+(?:\[[=>.]+\]|[━╸╺\x20]+\s)(?P<rest>.*)")
_KERAS_ETA = re.compile(r"(?:ETA:\s*|^)(?:(\d+):)?(?:(\d+):)?(\d+)s?\b")
_BAR_RUN = re.compile(r"[━╸╺█▏▎▍▌▋▊▉#=>-]{4,}[━╸╺█▏▎▍▌▋▊▉#=>.\s|\]-]*")
_BAR_OF = re.compile(rf"(?:\d{{1,3}}(?:\.\d+)?%\s+[^\d]*)?{_SIZE}[A-Za-z]*\s?/\s?{_SIZE}\s?(?P<unit>[A-Za-z]*)")
_WGET = re.compile(rf"(?P<phase>\S*)\s+(\d{{1,3}})%\s?\[[=>+\s]*\]\s+{_SIZE}B?(?P<rest>.*)")
_CURL = re.compile(
    rf"\s*(\d{{1,3}})\s+{_SIZE}\s+(\d{{1,3}})\s+{_SIZE}\s.*?\s(?P<eta>{_CLOCK}|--:--:--)\s+{_SIZE}\s*$"
)
_PERCENT = re.compile(r"(?<![\d.])(?P<percent>\d{1,3}(?:\.\d+)?)\s?%")
_ETA = re.compile(rf"(?:eta|ETA|remaining)[\s:]+({_CLOCK}|(?:\d+h)?\s?(?:\d+m)?\s?\d+s)|(?:^|\s)(-?{_CLOCK})\s*$")
_BAR_SIGNS = re.compile(r"[━╸╺█▏▎▍▌▋▊▉░▒▓•·…⠀-⣿|()\[\]]+|[#=>*<.-]{2,}")
_STEPS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}

_WORDS = r"global[_ ]step|steps?|iterations?|iters?|updates?|batch(?:es)?|epochs?"
_OF = re.compile(
    rf"\b(?P<word>{_WORDS})\b\s*[:=#]?\s*[\[(]?\s*(?P<done>\d[\d,]*(?:\.\d+)?)\s*(?:/|\bof\b)\s*(?P<total>\d[\d,]*)\b",
    re.IGNORECASE,
)
_AT = re.compile(
    r"\b(?P<word>global[_ ]step|step|iteration|iter|update|epoch)\b\s*[:=#]?\s*\[?(?P<done>\d[\d,]*)(?![\d.]*[\w%])",
    re.IGNORECASE,
)
# The PyTorch MNIST example, copied into countless scripts: 'Train Epoch: 1 [640/60000 (1%)]'.
_EPOCH_PART = re.compile(r"\bepoch\b[:\s]*(?P<epoch>\d+)\s*\[(?P<done>\d+)/(?P<total>\d+)\s*\(\d+%\)", re.IGNORECASE)
_MEASURED = re.compile(
    r"\b(?:\w*loss|lr|learning_rate|ppl|perplexity|acc(?:uracy)?|grad_norm|tok/s|tokens/s)\b", re.I
)
_HF_RECORD = re.compile(r"^\s*\{'[\w/]+': .*'epoch': '?(?P<done>\d+(?:\.\d+)?)'?.*\}\s*$")
_MAYBE_LINE = re.compile(r"step|iter|epoch|batch|update", re.IGNORECASE)

_PAIR = re.compile(r"""\s*([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"']*)(?=\s|$)""")


_BEFORE_TRAINING = re.compile(
    r"load|checkpoint|shard|restor|fetch|download|extract|map|filter|token|cach|read|import", re.IGNORECASE
)


def is_later_step(before: Progress | None, now: Progress) -> bool:
    """Whether training steps are counted. Bars over loaded shards or over data preparation are not steps."""
    return (
        before is not None
        and before.phase == now.phase
        and now.done > before.done
        and not _BEFORE_TRAINING.search(f"{now.phase} {now.unit}")
    )


def parse_bar(text: str) -> Progress | None:
    """A refresh of a bar (ended by CR): tqdm, rich, pip, wget, curl, keras, or any percentage."""
    text = text[:MAX_TEXT].rstrip()
    found = parse_known_bar(text) or _generic(text)
    if found is not None and found.total is not None and found.done >= found.total:
        return replace(found, eta_s=0.0)  # at the end rich shows the elapsed time in place of the time left
    return found


def parse_known_bar(text: str) -> Progress | None:
    """A bar in an unambiguous format, so that it may also be searched for in ordinary lines."""
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
    return _of(text) or _epoch_part(text) or _hf_record(text) or _at(text)


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
    evaluation does not distort it, but recurring pauses are included.
    """

    def __init__(self, *, num_samples: int = 40, spacing_s: float = 0.5) -> None:
        self._num_samples = num_samples
        self._spacing_s = spacing_s
        # One series per bar, since nested bars report alternately.
        self._series: dict[tuple[str, str, float | None], deque[tuple[float, float]]] = {}

    def update(self, progress: Progress, now_s: float) -> Progress:
        """The same report, with the rate and time left filled in where it lacks them and they are known."""
        samples = self._samples_of(progress)
        if samples and progress.done < samples[-1][1]:
            samples.clear()
        if not samples or now_s - samples[-1][0] >= self._spacing_s:
            samples.append((now_s, progress.done))
        rate = progress.rate_per_s if progress.rate_per_s is not None else median_rate(list(samples))
        eta = progress.eta_s if progress.eta_s is not None else _eta(progress, rate)
        return replace(progress, rate_per_s=rate, eta_s=eta)

    def _samples_of(self, progress: Progress) -> deque[tuple[float, float]]:
        key = (progress.phase, progress.unit, progress.total)
        samples = self._series.pop(key, None)
        self._series[key] = samples = deque(maxlen=self._num_samples) if samples is None else samples
        if len(self._series) > _MAX_SERIES:
            del self._series[next(iter(self._series))]
        return samples


def median_rate(samples: list[tuple[float, float]]) -> float | None:
    """Units a second from (time, done) pairs; None while there is only one."""
    reach = max(1, len(samples) // 2)
    slopes = sorted(
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in zip(samples, samples[reach:], strict=False)
        if after[0] > before[0]
    )
    middle = len(slopes) // 2
    return (slopes[middle] + slopes[~middle]) / 2 if slopes else None


def _tqdm(text: str) -> Progress | None:
    at = text.index("%|")
    percent = _TQDM_PERCENT.search(text[:at])
    if percent is None:
        return None
    phase = text[: percent.start()]
    match = _TQDM.match(text, at)
    if match is None:
        return _percent(phase, percent[0])  # a custom bar_format: the percentage is still certain
    done = _scaled(match["done"], match["done_step"])
    total = _scaled(match["total"], match["total_step"])
    rate, unit = _rate(match["rate"] or "")
    eta = None if match["eta"] == "?" else _seconds(match["eta"])
    return Progress(_words(phase), done, total, unit or match["unit"], rate, eta, "bar")


def _tqdm_open(text: str) -> Progress | None:
    match = _TQDM_OPEN.search(text)
    if match is None or text[: match.start()].rstrip()[-1:] not in ("", ":"):
        return None
    rate, unit = _rate(match["rate"] or "")
    done = _scaled(match["done"], match["done_step"])
    return Progress(_words(text[: match.start()]), done, None, unit or match["unit"], rate, None, "bar")


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
    """A bar of rich with a count, or of pip: '━━━━ 12.3/45.6 MB 3.2 MB/s eta 0:00:10'."""
    run = _BAR_RUN.search(text)
    match = _BAR_OF.match(text, run.end()) if run else None
    if run is None or match is None:
        return None
    unit = match["unit"]
    step = match[4] or (unit[0] if len(unit) > 1 and unit[0] in "kMGT" and unit[-1] == "B" else "")
    rest = text[match.end() :]
    rate, rate_unit = _rate(rest)
    done, total = _scaled(match[1], match[2] or step), _scaled(match[3], step)
    unit = "B" if unit.endswith("B") else rate_unit or unit
    return Progress(_words(text[: run.start()]), done, total, unit, rate, _eta_text(rest), "bar")


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
    match = _PERCENT.search(text)
    return _percent(text[: match.start()], match["percent"], _eta_text(text[match.end() :])) if match else None


def _percent(phase: str, percent: str, eta_s: float | None = None) -> Progress | None:
    value = float(percent)
    return Progress(_words(phase), value, 100.0, "%", None, eta_s, "bar") if value <= 100 else None


def _of(text: str) -> Progress | None:
    match = _finest(list(_OF.finditer(text)))
    if match is None:
        return None
    done, total = _float(match["done"]), _float(match["total"])
    return Progress("", done, total, _unit(match["word"]), None, None, "line") if done <= total else None


def _at(text: str) -> Progress | None:
    match = _finest(list(_AT.finditer(text)))
    if match is None or not _MEASURED.search(text):
        return None
    return Progress("", _float(match["done"]), None, _unit(match["word"]), None, None, "line")


def _finest(found: list[re.Match[str]]) -> re.Match[str] | None:
    """The fastest of several counters in a line: 'Epoch 3/10, step 120/1000' is at step 120."""
    return next((one for one in found if not one["word"].lower().startswith("epoch")), found[0] if found else None)


def _epoch_part(text: str) -> Progress | None:
    match = _EPOCH_PART.search(text)
    if match is None:
        return None
    return Progress(f"epoch {match['epoch']}", float(match["done"]), float(match["total"]), "", None, None, "line")


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
    if match["unit"] is not None:
        return (_scaled(match[1], match[2]) if match[1] else None), match["unit"]
    seconds = _float(match[4]) if match[4] else _float(match[6]) * (1e-3 if match[7] == "ms" else 1e-6)
    return (1 / seconds if seconds else None), match["per"] or match["each"]


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

"""Progress bars: tqdm, rich, pip, wget, curl, Keras, or any percentage that is redrawn.

Owns their formats. Does not own: lines with counters (lines.py), nor which of several bars is the run's (journey.py).
"""

from __future__ import annotations

import re
from dataclasses import replace

from jackline.supervisor.output.progress import MAX_TEXT, Progress

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_SIZE = rf"({_NUMBER})\s?((?:[kKMGTP](?:i(?=B))?)?)"
_CLOCK = r"(?:\d+ ?d(?:ays?)?,? ?)?\d+(?::\d\d){1,2}"
# Every pattern is anchored or a simple search, so that no text can make matching slow.
_TQDM = re.compile(
    rf"%\|[^|]*\|\s*(?P<done>{_NUMBER})(?P<done_step>[kMGTP]?)[A-Za-z]*\s?/\s?"
    rf"(?P<total>{_NUMBER})(?P<total_step>[kMGTP]?)(?P<unit>[A-Za-z]*)\s*"
    rf"\[{_CLOCK}<(?P<eta>{_CLOCK}|\?)(?:,\s*(?P<rate>[^,\]]+))?"
)
# ignite: 'Epoch [1/3]: [50/60]  83%|████▎ , loss=0.6 [00:02<00:00]'
_TQDM_COUNTED = re.compile(r"\[(\d+)/(\d+)\]\s*$")
_TQDM_LEFT = re.compile(rf"\[{_CLOCK}<({_CLOCK})\]")
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
_LIGHTNING = re.compile(r"^\W*Epoch (\d+)/(\d+) .*(?:\bv_num: | • \S+ \d+\.\d\dit/s)")
_WGET = re.compile(rf"(?P<phase>\S*)\s+(\d{{1,3}})%\s?\[[=>+\s]*\]\s+{_SIZE}B?(?P<rest>.*)")
_CURL = re.compile(
    rf"\s*(\d{{1,3}})\s+{_SIZE}\s+(\d{{1,3}})\s+{_SIZE}\s.*?\s(?P<eta>{_CLOCK}|--:--:--)\s+{_SIZE}\s*$"
)
_PERCENT = re.compile(r"(?<![\d.])(?P<percent>\d{1,3}(?:\.\d+)?)\s?%")
_PERCENT_OF = re.compile(rf"\s*\(\s*({_NUMBER}) of ({_NUMBER})\)")  # progressbar2: ' 87% (174 of 200) |####  |'
_ETA = re.compile(
    rf"(?:eta|ETA|remaining)[\s:=]+({_CLOCK}|(?:\d+h)?\s?(?:\d+m)?\s?\d+s|\d+h\s?\d+m\b)|(?:^|\s)(-?{_CLOCK})\s*$"
)
_BAR_SIGNS = re.compile(r"[━╸╺█▏▎▍▌▋▊▉░▒▓•·…⠀-⣿|()\[\]]+|[#=>*<.-]{2,}")
_STEPS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


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


def _tqdm(text: str) -> Progress | None:
    at = text.index("%|")
    percent = _TQDM_PERCENT.search(text[:at])
    if percent is None:
        return None
    phase = text[: percent.start()]
    match = _TQDM.match(text, at)
    if match is None:
        return _custom_tqdm(phase, percent[0], text)
    done = _scaled(match["done"], match["done_step"])
    total = _scaled(match["total"], match["total_step"])
    rate, unit = _rate(match["rate"] or "")
    eta = None if match["eta"] == "?" else _seconds(match["eta"])
    return Progress(_words(phase), done, total, unit or match["unit"], rate, eta, "bar")


def _custom_tqdm(phase: str, percent: str, text: str) -> Progress | None:
    """A `bar_format` of somebody's own: the percentage is certain, and a count right before it."""
    counted, left = _TQDM_COUNTED.search(phase), _TQDM_LEFT.search(text)
    eta_s = _seconds(left[1]) if left else None
    if counted is None or float(counted[1]) > float(counted[2]):
        return _percent(phase, percent, eta_s)
    return Progress(_words(phase[: counted.start()]), float(counted[1]), float(counted[2]), "", None, eta_s, "bar")


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
    phase = _words(text[: run.start()])
    found = Progress(phase, done, total, unit, rate, _eta_text(rest), "bar")
    epoch = _LIGHTNING.search(text)
    if epoch is None:
        return found
    # Lightning counts from 0 and shows the number of the last epoch: 'Epoch 0/9' is the first of ten.
    return replace(found, of="epoch", epoch=float(epoch[1]), epochs=float(epoch[2]) + 1)


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
    counted = _PERCENT_OF.match(text, match.end()) if match else None
    if match and counted and _float(counted[1]) <= _float(counted[2]):
        done, total = _float(counted[1]), _float(counted[2])
        return Progress(_words(text[: match.start()]), done, total, "", None, _eta_text(text[counted.end() :]), "bar")
    return _percent(text[: match.start()], match["percent"], _eta_text(text[match.end() :])) if match else None


def _percent(phase: str, percent: str, eta_s: float | None = None) -> Progress | None:
    value = float(percent)
    return Progress(_words(phase), value, 100.0, "%", None, eta_s, "bar") if value <= 100 else None


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
    days, _, rest = clock.replace("day", "d").rpartition("d")
    total = 0.0
    for part in rest.lstrip("s, ").split(":"):
        total = total * 60 + float(part)
    return total + (86400 * float(days) if days.strip() else 0)


def time_left(text: str) -> float | None:
    """What a plain line says by name: 'eta: 1:23:45', 'remaining: 1h 2m 3s'."""
    match = _ETA.search(text)
    return _left(match[1]) if match is not None and match[1] else None


def _eta_text(text: str) -> float | None:
    match = _ETA.search(text)
    return _left((match[1] or match[2]).lstrip("-")) if match is not None else None


def _left(words: str) -> float:
    if ":" in words:
        return _seconds(words)
    return sum(
        float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", words)
    )


def _words(text: str) -> str:
    return " ".join(_BAR_SIGNS.sub(" ", text).split()).rstrip(":").strip()[:80]

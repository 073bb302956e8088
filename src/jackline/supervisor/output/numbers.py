"""Metrics that a program prints: loss, learning rate, accuracy and what else has a name and a number.

Owns which names are metrics. A number counts only with a name that says what it is; in a JSON record, a printed dict
or the end of a tqdm bar every named number counts. Does not own: counters (lines.py), unknown formats (learned.py),
nor where the numbers are written (rundir/records/metrics.py).
"""

from __future__ import annotations

import functools
import itertools
import re

MAX_TEXT = 1000
MAX_NUMBERS = 24
_NUMBER = r"[-+]?(?:\d+(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# Not the '.95' of the name 'mAP@.5:.95'.
_VALUE = re.compile(
    rf"(?<![\w.@])(?<!@\.5:)(?<!@0\.5:)(?:{_NUMBER}|[-+]?(?:nan|inf)\b)(?!\w|:\d|\.\d|-\d)(?P<percent>%?)",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"(?P<name>[A-Za-z][\w@./%-]*(?: [A-Za-z][\w@./%-]*){0,2})['\"]?\s*(?:\([^()]{0,12}\))?\s*(?:[:=|]\s*)?"
    r"[\['\"(]{0,2}$"
)
_NAME_CHARS = 56
_OUT_OF = re.compile(r"\s?/\s?(\d[\d,]*)(?![\d.])")
_PAIR = re.compile(
    rf"""['"](?P<name>[A-Za-z][\w/.@ -]{{0,59}})['"]\s*:\s*['"]?(?P<value>{_NUMBER}|NaN|nan|-?Infinity|-?inf)"""
    r"""(?=['"]?\s*(?:[,}\]]|$))"""
)
_POSTFIX = re.compile(
    rf"[,\[]\s*(?P<name>[A-Za-z][\w/.@ -]{{0,59}})=\s*(?P<value>{_NUMBER}|nan|inf)(?P<unit>[%A-Za-z]?)"
)
_BRACKET = re.compile(r"\[\d+:\d\d[^\]]*\]\s*$")
_PACE = re.compile(r"\w{1,8}/s|[mu]?s/\w{1,8}|[kmgt]?/[\d.]+\w?")  # Lightning: '18.48it/s train_loss: 0.004'
_HELD_OUT = re.compile(r"(?<![A-Za-z])(val|valid|validation|test|eval|evaluation|dev)(?![A-Za-z])", re.IGNORECASE)

# These are metrics whatever their value looks like.
_STRONG = re.compile(
    r"\w*loss|losses|acc|accuracy|acc1|acc5|ppl|perplexity|reward|rew|nll|xent|bpb|bpc|bpd|rmse|mse|mae|elbo"
)
# These are also ordinary words: they count only with a decimal number ('score 0.91', not 'score 3').
_WEAK = re.compile(
    r"lr|learning|auc|auroc|auprc|f1|precision|recall|ap|map|ap50|map50|r2|mape|logloss|psnr|ssim|fid|lpips|m?iou|dice"
    r"|bleu|rouge|wer|cer|return|score|entropy|kld?|b?ce|gnorm|norm|grad|mfu|err|error|spearman|pearson|corr"
    r"|correlation|mcc|kappa|ndcg|mrr|top1|top5|l1|l2|sparsity|tflops|throughput"
)
_SPEED = re.compile(r"(?:tok(?:en)?s?|samples?|img|images?|examples?|words?)[/_ ]?(?:per[_ ])?s(?:ec)?\b|^tps$|^wps$")
_NEVER = re.compile(
    r"time|ms|secs?|seconds|eta|elapsed|mem|memory|date|epochs?|steps?|iters?|iterations?|updates?|batch|batches|num|seed|rank"
    r"|world|size|dt|ts|timestamp|total_time|remaining|v_num|interval|version|port|pid"
)
MEASURED = re.compile(
    r"loss|(?<![a-z])(?:lr|learning_rate|learning rate|ppl|perplexity|acc|accuracy|grad_norm|tok/s|tokens/s|rew"
    r"|reward|rmse|mse|mae|auc|f1|logloss|l2|nll|bpb|error|score|return|iou|psnr|kl|entropy|norm|map|wer|bleu|dice|ap|fid"
    r"|mfu|top1)"
    r"(?![a-z])",
    re.IGNORECASE,
)


def read_numbers(text: str) -> dict[str, float]:
    """The metrics of one line or bar, named as printed but in lower case; {} where there is none."""
    text = text[:MAX_TEXT].replace("'s ", " ")  # LightGBM: "valid_0's l2: 0.12"
    record = read_record(text)
    if record is not None:
        kept = {name: value for name, value in record.items() if not _is_never(name)}
        return dict(list(kept.items())[:MAX_NUMBERS])
    found = _postfix(text)
    if MEASURED.search(text):
        found = {**_named(text), **found}
    return dict(list(found.items())[:MAX_NUMBERS])


def read_record(text: str) -> dict[str, float] | None:
    """The numbers of a JSON object or of a printed dict, counters included; None where the line is neither."""
    start = text.find("{")
    if start < 0 or not text.rstrip().endswith("}") or start > 80:
        return None
    found = {match["name"]: _float(match["value"]) for match in _PAIR.finditer(text, start)}
    return found or None


def is_metric(name: str, value: str) -> bool:
    """Whether a number with this name is a metric. `value` as printed."""
    return _is_metric(name, any(sign in value for sign in ".eE%n"))


@functools.lru_cache(maxsize=256)  # a training prints the same names again and again
def _is_metric(name: str, is_decimal: bool) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if not words or _NEVER.fullmatch(words[-1]) or words[0] in ("eta", "elapsed"):
        return False
    if any(_STRONG.fullmatch(word) for word in words):
        return True
    return is_decimal and (any(_WEAK.fullmatch(word) for word in words) or bool(_SPEED.search(name.lower())))


def _named(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    end = 0
    held_out = [(match.end(), match[1].lower()) for match in _HELD_OUT.finditer(text)]
    for match in itertools.islice(_VALUE.finditer(text), 2 * MAX_NUMBERS):
        before, end = text[max(end, match.start() - _NAME_CHARS) : match.start()], match.end()
        name = _NAME.search(before)
        if name is None or not is_metric(name["name"], match[0]):
            continue
        value = _float(match[0].rstrip("%"))
        whole = _OUT_OF.match(text, match.end()) if not match["percent"] else None
        if whole is not None:
            value, end = value / max(1.0, _float(whole[1])), whole.end()  # 'Accuracy: 9825/10000'
        named_at = match.start() - len(before) + name.start()
        said = next((word for word in reversed(held_out) if word[0] <= named_at), None)
        between = text[said[0] : named_at] if said is not None else ""
        found.setdefault(_plain(name["name"], said[1] if said is not None else "", between), value)
    return found


def _postfix(text: str) -> dict[str, float]:
    """The words that tqdm shows behind its rate: [00:12<00:15, 36.1it/s, loss=2.1, v_num=3]."""
    bracket = _BRACKET.search(text[-600:]) if "%|" in text or "it/s" in text or "s/it" in text else None
    if bracket is None:
        return {}
    pairs = (match for match in _POSTFIX.finditer(bracket[0]) if match["unit"] in ("", "%"))
    return {_plain(match["name"]): _float(match["value"]) for match in pairs if not _is_never(match["name"])}


@functools.lru_cache(maxsize=256)
def _plain(name: str, held_out: str = "", between: str = "") -> str:
    """'Average loss' after 'Test set:' -> 'test_average_loss'. `between`: the text from 'Test' to the name."""
    words = name.lower().split()
    while len(words) > 1 and _PACE.fullmatch(words[0]):
        words = words[1:]
    plain = "_".join(words).strip("._-%/:")
    is_own = "|" in between or "train" in between.lower() or "train" in plain or _HELD_OUT.search(name) is not None
    return (f"{held_out}_{plain}" if held_out and not is_own else plain)[:60]


def _is_never(name: str) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if not words or words[0] in ("eta", "time"):
        return True
    return bool(_NEVER.fullmatch(name.lower()) or _NEVER.fullmatch(words[-1]))


def _float(text: str) -> float:
    try:
        return float(text.replace(",", "").replace("Infinity", "inf"))
    except ValueError:
        return float("nan")

"""Environment variables that decided the forerunner's trainings, and the setting each has become.

None is read here: a variable left over in a shell must not change a run, and one that somebody relies on must not be
passed over in silence. So what is set is named, with its replacement. Owns the list, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PREFIX = "NSA_"
_ONE_ROAD = "nothing to choose: kernels where they are verified on this GPU, plain torch elsewhere, tested equal"
_ONE_GPU = "training on several GPUs is not there yet"
_SCALER = "torch's own growth; --precision bf16 or auto needs no scaler"
_WATCHED = "always on, at no cost for a step"
_READ_AHEAD = "data is read and tokenised ahead by a process of its own"
_FINDS = "`jackline why RUN` shows where every thread stands; sentinels name the first bad tensor"

OLD_ENVIRONMENT: Mapping[str, str] = {
    "CONFIG": "--config FILE",
    "NSA_SEQ_LEN": "--seq-len N",
    "NSA_BATCH_SIZE": "--batch-size N",
    "NSA_ACCUM": "--batch-size N --accum-batches N",
    "NSA_LR": "--lr X",
    "NSA_NO_GC": "--recompute no, as it is unless asked for",
    "NSA_OPT_FUSED": "the fused update is taken where there is one",
    "NSA_DETECT_ANOMALY": _FINDS,
    "NSA_MEM_DUMP_EVERY": "`jackline plan m7c --explain` says where memory goes",
    "NSA_TB_DISABLE": "curves cost a tenth of a millisecond a step and are always drawn, into RUN/tb",
    "NSA_DISABLE_CSV_LOGS": "numbers are in RUN/metrics-0.jsonl",
    "NSA_HEARTBEAT_EVERY": _WATCHED,
    "NSA_LOG_GRAD_NORM": _WATCHED,
    "NSA_DISABLE_AUX_STATS": "--stats-every 0",
    "NSA_DEBUG_LOSS": _FINDS,
    "NSA_TRACE_GRADS": _FINDS,
    "NSA_TRACE_MODULE_BWD": _FINDS,
    "NSA_TRACE_DDP_BUCKETS": _ONE_GPU,
    "NSA_PG_TIMEOUT_MIN": _ONE_GPU,
    "TORCH_BACKEND": _ONE_GPU,
    "NSA_STOPGRAD_GATES": "gates are always learnt",
    "NSA_ROPE_SCALE": "positions are turned by their own number",
    "NSA_STRICT_ASSERTS": "shapes and settings are checked before the first step",
}
# The rest of them by how their names begin.
_FAMILIES = (
    ("NSA_SCALER_", _SCALER),
    ("NSA_DDP_", _ONE_GPU),
    ("NSA_FWE_", _READ_AHEAD),
    ("NSA_GC_", "--recompute yes recomputes every layer"),
    ("NSA_", _ONE_ROAD),
)


def unread_lines(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set and was read once."""
    for name in sorted(environ):
        if name in OLD_ENVIRONMENT or name.startswith(PREFIX):
            meant = OLD_ENVIRONMENT.get(name) or next(text for begin, text in _FAMILIES if name.startswith(begin))
            yield f"${name}={environ[name]} is not read: {meant}"

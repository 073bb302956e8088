"""How much arithmetic a token costs, and what share of the GPU's best that is (MFU).

Owns the count (6 N + 12 L d T a token: forward and backward, attention included, recomputation not) and the table of
peaks. Knows nothing of timing: whoever measured tokens/s divides. On a CPU and on GPUs that are not in the table
there is no peak, so no MFU is shown rather than a wrong one.
"""

from __future__ import annotations

import re

from jackline.models.nsa import shape as nsa
from jackline.models.nsa.shape import NSAShape
from jackline.models.shapes import GPTShape, count_parameters

_TERA = 1e12
# (pattern of the driver's name, bf16, fp16, fp32), dense, in TFLOP/s, first match wins. None: the GPU cannot.
# Data sheets, but for the H200: there 780 is the best a plain 8192^3 bf16 product reached, and what we count against.
_PEAKS: tuple[tuple[str, float | None, float, float], ...] = (
    (r"\bH200\b", 780, 780, 67),
    (r"\bH100 PCIE\b", 756, 756, 51),
    (r"\bH100\b", 989, 989, 67),
    (r"\bA100\b", 312, 312, 19.5),
    (r"\bL40S\b", 362, 362, 91.6),
    (r"\bL4\b", 121, 121, 30.3),
    (r"\bA10G\b", 70, 70, 31.5),
    (r"\bRTX 4090\b", 165, 165, 82.6),
    (r"\bV100\b", None, 125, 15.7),
    (r"\bP100\b", None, 18.7, 9.3),
    (r"\bT4\b", None, 65, 8.1),
)


def flops_per_token(shape: GPTShape | NSAShape, seq_len: int) -> float:
    """Of one training step, for each token of it.

    N are the weights that are multiplied: a position is only looked up, and so is an embedding that is not the head
    as well.
    """
    if isinstance(shape, NSAShape):
        return nsa.flops_per_token(shape, seq_len)  # the keys that are read, not all there are
    multiplied = count_parameters(shape) - shape.context * shape.width
    if not shape.is_tied:
        multiplied -= shape.vocab_size * shape.width
    return 6.0 * multiplied + 12.0 * shape.num_layers * shape.width * seq_len


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s at best, None where nobody knows: a CPU, an unknown GPU, a precision the GPU has no unit for."""
    name = re.sub(r"[-_]", " ", device_name).upper()
    for pattern, bf16, fp16, fp32 in _PEAKS:
        if re.search(pattern, name):
            peak = {"bf16": bf16, "bf16-weights": bf16, "fp16": fp16, "fp32": fp32}.get(precision)
            return None if peak is None else peak * _TERA
    return None


def mfu(tokens_per_s: float, flops_of_token: float, peak: float | None, num_devices: int = 1) -> float | None:
    """A share from 0 to 1; None without a peak, and where the arithmetic is not known."""
    return None if not peak or not flops_of_token else tokens_per_s * flops_of_token / (peak * num_devices)

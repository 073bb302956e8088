"""Errors of a GPU, and of the communication between GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, place_line, ran_line
from jackline.diagnosis.deaths.traceback_text import ErrorText
from jackline.immutable import immutable

_CUDA = re.compile(
    r"(?:CUDA|HIP) error: (.+)|CUBLAS_STATUS_(?!ALLOC_FAILED)\w+|CUDNN_STATUS_(?!ALLOC_FAILED)\w+|cuDNN error: .+"
)
_ASSERTION = re.compile(r"Assertion `(.+?)` failed")
_WATCHDOG = re.compile(r"[Ww]atchdog caught collective operation timeout: WorkNCCL\((.*)\)")
_OPERATION = re.compile(r"OpType=(\w+)")
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d+)")
_RANK = re.compile(r"\[?[Rr]ank ?(\d+)\]?")
_NCCL_LOST = re.compile(
    r"ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|NCCL error.*(?:remote process exited|system error)"
)
_NCCL_SAID = re.compile(r"NCCL error.*?\.[ch]pp:\d+, (?P<words>[a-z ]*[a-z])|NCCL error")
_NCCL_DUPLICATE = re.compile(r"Duplicate GPU detected ?: ?rank (\d+) and rank (\d+)")


@immutable
class _Kind:
    words: str
    title: str
    hint: str
    is_retryable: bool = False


# PyTorch ends each CUDA error with the same advice, which names errors that did not happen.
_ADVICE = re.compile(
    r"CUDA kernel errors might be asynchronously|For debugging consider passing|Compile with `?TORCH_USE_CUDA_DSA"
    r"|Search for `?cuda\w+|Device-side assertion tracking"
)
_BLOCKING = "CUDA_LAUNCH_BLOCKING=1 makes the traceback point at the right line"
_RESTART = "a fault of the GPU or its driver: start again; if it returns, `nvidia-smi -q` and another GPU"
_DRIVER = "`nvidia-smi` must show the GPU; `jackline doctor` names what is missing"
_KINDS = (
    _Kind(
        "device-side assert",
        "a CUDA kernel found a value out of range (device-side assert)",
        f"most often a label or token id is too large; {_BLOCKING}",
    ),
    _Kind(
        "illegal memory access",
        "a CUDA kernel touched memory it does not own (illegal memory access)",
        f"suspect custom kernels first; {_BLOCKING}",
    ),
    _Kind(
        "no kernel image",
        "this PyTorch was not built for this GPU (no kernel image)",
        "install a PyTorch whose torch.cuda.get_arch_list() holds the GPU's sm_ number",
    ),
    _Kind("unspecified launch failure", "a CUDA kernel failed without a reason (launch failure)", _RESTART, True),
    _Kind("ECC error", "the GPU's memory had an error it could not correct (ECC)", _RESTART, True),
    _Kind("fallen off the bus", "the GPU fell off the bus", _RESTART, True),
    _Kind("GPU is lost", "the GPU was lost", _RESTART, True),
    _Kind(
        "busy or unavailable",
        "the GPU is taken by another process",
        "`nvidia-smi` shows who holds it; an exclusive-process mode allows only one",
    ),
    _Kind(
        "driver on your system is too old",
        "the NVIDIA driver is too old for this PyTorch",
        "update the driver, or install a PyTorch built for an older CUDA: `nvidia-smi` names the newest it can run",
    ),
    _Kind(
        "driver/library version mismatch",
        "the NVIDIA driver was updated while its old module is still loaded",
        "restart the machine, or unload and load the nvidia kernel modules",
    ),
    _Kind(
        "Unexpected error from cudaGetDeviceCount",
        "the NVIDIA driver did not start its GPUs",
        "`nvidia-smi` must work first; a machine with NVSwitch needs the service nvidia-fabricmanager",
    ),
    _Kind("driver version is insufficient", "the NVIDIA driver is too old for this PyTorch", _DRIVER),
    _Kind("no CUDA-capable device", "no GPU was found", _DRIVER),
    _Kind("Found no NVIDIA driver", "no NVIDIA driver was found", _DRIVER),
    _Kind("No CUDA GPUs are available", "no GPU was found", _DRIVER),
    _Kind("invalid device ordinal", "it asked for a GPU number that does not exist", _DRIVER),
    _Kind(
        "not compiled with CUDA enabled",
        "this PyTorch is the CPU build",
        "install the CUDA build of PyTorch, or run with device=cpu",
    ),
)


def cuda_error(error: ErrorText, evidence: Evidence) -> Finding | None:
    text = "\n".join(line for line in error.text.splitlines() if not _ADVICE.search(line))
    kind = next((kind for kind in _KINDS if kind.words.lower() in text.lower()), None)
    match = _CUDA.search(text)
    if match is None and kind is None:
        return None
    if kind is None:
        said = (match[1] or match[0]) if match else ""
        kind = _Kind("", f"CUDA error: {said[:160]}", _BLOCKING)
    assertion = next((found for line in evidence.output_tail if (found := _ASSERTION.search(line))), None)
    said_by_kernel = (f"the kernel's own check: {assertion[1]}",) if assertion else ()
    return Finding(
        "cuda_error",
        "certain",
        f"{kind.title}{at_place(error.place)}",
        (*place_line(error.place), *said_by_kernel, *ran_line(evidence)),
        kind.hint,
        kind.is_retryable,
        error.place,
    )


def nccl_timeout(lines: Sequence[str], evidence: Evidence, error: ErrorText | None) -> Finding | None:
    """The NCCL watchdog prints log lines, not a traceback, and then ends the process with SIGABRT."""
    for line in lines:
        match = _WATCHDOG.search(line)
        if match:
            return _watchdog_finding(line, match[1], evidence, error)
    text = error.text if error else ""
    if error is not None and not _NCCL_LOST.search(text):
        return _nccl_refusal(text, error, evidence)
    if not _NCCL_LOST.search(text):
        return None
    title = f"the GPUs lost contact with one another{at_place(error.place if error else None)}"
    hint = "one rank crashed or the network between them failed: look for the first rank that says anything else"
    said = (error.first_line[:200],) if error else ()
    return Finding("nccl_timeout", "likely", title, (*said, *ran_line(evidence)), hint, True)


def _nccl_refusal(text: str, error: ErrorText, evidence: Evidence) -> Finding | None:
    """NCCL itself refused a call: nobody was lost, and a restart would meet the same refusal."""
    said = _NCCL_SAID.search(text)
    if said is None:
        return None
    detail = (*place_line(error.place), error.first_line[:200], *ran_line(evidence))
    twice = _NCCL_DUPLICATE.search(text)
    if twice is not None:
        title = f"ranks {twice[1]} and {twice[2]} use the same GPU{at_place(error.place)}"
        hint = (
            "start at most one rank for each GPU (--nproc-per-node), and let each choose its own before it joins: "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"
        )
        return Finding("cuda_error", "certain", title, detail, hint, False, error.place)
    words = f": {said['words']}" if said["words"] else ""
    title = f"NCCL failed{words}{at_place(error.place)}"
    hint = (
        "NCCL_DEBUG=WARN in the environment makes it say why; often ranks share a GPU, or a tensor is on another one"
    )
    return Finding("cuda_error", "likely", title, detail, hint, False, error.place)


def _watchdog_finding(line: str, facts: str, evidence: Evidence, error: ErrorText | None) -> Finding:
    operation, timeout, rank = _OPERATION.search(facts), _TIMEOUT.search(facts), _RANK.search(line)
    what = operation[1] if operation else "a collective operation"
    waited = f" for {int(timeout[1]) / 1000:.0f} s" if timeout else ""
    who = f"rank {rank[1]}" if rank else "a rank"
    place = (error.place if error else None) or evidence.last_frame
    return Finding(
        "nccl_timeout",
        "certain",
        f"{who} waited{waited} in {what} for another rank that never came (NCCL watchdog)",
        (*place_line(place), *ran_line(evidence)),
        "the rank that is missing is the culprit: look for a slow or stuck one, or a rank that took another branch",
        True,
        place,
    )

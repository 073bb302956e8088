"""The tables that turn frames into phases: building, forward, backward, compiling, saving, downloading ...

A phase needs evidence: a function that only runs in it. That a file of torch._dynamo is in the stack proves nothing,
since gradient checkpointing, optimizers and the steady state of a compiled model pass through it too.
docs/guides/run.md has the table for people. Owns the tables; `doing` owns the words around them. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from jackline.diagnosis.frames import Frame

COMPILING = "compiling"
DOWNLOADING = "downloading"
GPU_WAIT = "waiting for the GPU"
FORWARD = "in the forward pass"
OPTIMIZER_STEP = "in the optimizer step"
DATA = "loading data"
DATA_WAIT = "waiting for the data loader's workers"
EVALUATING = "evaluating"


class Row(NamedTuple):
    """A frame proves `phase` when its file and its function match. Functions are matched without their class."""

    phase: str
    file: str
    function: str = ""


# The first row that matches any frame of the main thread wins, so the rarer phase comes first: a download inside a
# data loader is a download, and the forward pass that gradient checkpointing repeats is part of the backward pass.
_ROWS = (
    # What runs only while a frame is traced or code is generated. Wrappers around compiled code are not in here:
    # eval_frame.py, runtime_wrappers.py, output_code.py, inductor/runtime and the generated code itself.
    Row(COMPILING, r"/torch/_dynamo/(convert_frame|symbolic_convert|output_graph|variables/\w+)\.py"),
    Row(COMPILING, r"/torch/_inductor/(graph|scheduler|lowering|ir|pattern_matcher|select_algorithm)\.py"),
    Row(COMPILING, r"/torch/_inductor/(codegen|fx_passes)/"),
    Row(COMPILING, r"/torch/_inductor/(async_compile|cpp_builder|codecache)\.py", r"wait|compile|build|load|write"),
    Row(COMPILING, r"/torch/_inductor/compile_fx\w*\.py", r"compile|codegen"),
    Row(COMPILING, r"/torch/_inductor/runtime/\w+\.py", r"precompile|make_launcher|autotune|benchmark_all"),
    Row(COMPILING, r"/torch/_functorch/(aot_autograd|partitioners)\.py", r"create_aot|dispatch|partition|compile"),
    Row(COMPILING, r"/torch/_functorch/_aot_autograd/\w*compile\w*\.py", r"create_aot|dispatch|_stage|compile_"),
    Row(COMPILING, r"/torch/jit/_(script|trace)\.py", r"^(script|trace|create_script_module|_trace_impl)"),
    Row(COMPILING, r"/triton/(compiler|runtime|backends)/", r"compile|make_\w+ir|ast_to"),
    Row(COMPILING, r"/torch/utils/cpp_extension\.py", r"load|compile|build|ninja"),
    Row(COMPILING, r"/numba/core/(dispatcher|compiler\w*|typeinfer|lowering)\.py", r"compile|run_pass|lower"),
    Row(COMPILING, r"/jax/_src/(compiler|interpreters/(mlir|pxla))\.py", r"compile|lower"),
    Row("saving a checkpoint", r"/torch/serialization\.py", r"^_?(legacy_)?save|persistent_id|write_record"),
    Row("saving a checkpoint", r"/torch/distributed/checkpoint/", r"save"),
    Row("saving a checkpoint", r"/(safetensors|keras|flax|orbax)/", r"^(_?save|serialize)"),
    Row("saving a checkpoint", r"/(transformers|accelerate|diffusers)/", r"^_?save_(pretrained|check\w+|model|sta)"),
    Row("saving a checkpoint", r"/(pytorch_)?lightning/", r"save_(checkpoint|last|topk|top_k|none)|dump_checkpoint"),
    Row("loading a checkpoint", r"/torch/serialization\.py", r"^_?(legacy_)?load|read_record|unpickl"),
    Row("loading a checkpoint", r"/torch/distributed/checkpoint/", r"load|read"),
    Row("loading a checkpoint", r"/torch/nn/modules/\w+\.py", r"^_load_from_state_dict$|^load_state_dict$|^load$"),
    Row("loading a checkpoint", r"/safetensors/", r"load|get_tensor"),
    Row("loading a checkpoint", r"/(transformers|diffusers)/\w*modeling_utils\.py", r"from_pretrained|load_"),
    Row(DOWNLOADING, r"/huggingface_hub/|/boto3?/|/botocore/|/gcsfs/|/s3fs/|/gdown/|/torch/hub\.py"),
    Row(DOWNLOADING, r"/urllib/request\.py|/urllib3/|/requests/|/httpx/|/httpcore/|/aiohttp/|/ftplib\.py"),
    Row("tokenising", r"/transformers/tokenization|/tokenizers/|/tiktoken/|/sentencepiece/"),
    Row("building the optimizer", r"/torch/optim/", r"^__init__$|add_param_group"),
    Row("moving the model to its device", r"/torch/nn/modules/module\.py", r"^(_apply|to|cuda|half|bfloat16|float)$"),
    Row("building the model", r"/torch/nn/(modules/(?!module\.py)\w+|init)\.py", r"^(__init__|_?reset_par\w+|\w*_)$"),
    Row("building the model", r"/transformers/", r"^_?init(ialize)?_weights$|^post_init$|^from_config$"),
    Row(GPU_WAIT, r"/torch/(cuda|xpu|mps)/", r"synchronize"),
    Row("in the backward pass", r"/torch/autograd/(__init__|graph)\.py", r"^(backward|grad|_engine_run_backward)$"),
    Row("in the backward pass", r"/torch/_tensor\.py", r"^backward$"),
    Row("clipping gradients", r"/torch/nn/utils/clip_grad\.py"),
    Row("waiting for other ranks", r"/torch/distributed/", r"barrier|all_reduce|all_gather|broadcast|wait|^recv$"),
    Row("waiting for other ranks", r"/torch/distributed/", r"reduce_scatter|all_to_all|^(gather|scatter|reduce)"),
    Row(DATA_WAIT, r"/torch/utils/data/dataloader\.py", r"^_try_get_data$|^_get_data$"),
    Row(DATA, r"/torch/utils/data/"),
    Row(DATA, r"/datasets/(arrow_dataset|builder|iterable_dataset|load)\.py"),
    Row(FORWARD, r"/torch/nn/modules/", r"^(forward|_call_impl|_wrapped_call_impl)$"),
    Row(FORWARD, r"/torch/nn/functional\.py"),
    # Last of the three: Lightning and L-BFGS run forward and backward inside of the optimizer's step.
    Row(OPTIMIZER_STEP, r"/torch/optim/(?!lr_scheduler)", r"step$|_tensor_|^_fused_|zero_grad|profile_hook"),
    Row("installing packages", r"/pip/_internal/"),
    Row("waiting for a child process", r"/subprocess\.py", r"wait|communicate|run|call"),
)  # fmt: skip
_BY_FRAME = tuple((row.phase, re.compile(row.file), re.compile(row.function)) for row in _ROWS)
# Matches the user's own function names, when no library frame matches.
_BY_FUNCTION: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        ("tokenising", r"token(ize|ise)"),
        (DOWNLOADING, r"(^|_)download"),
        ("saving a checkpoint", r"save_(checkpoint|model|state)|checkpoint_save"),
        ("loading a checkpoint", r"load_(checkpoint|model|state)|resume_from"),
        (DATA, r"load_(data|dataset|corpus)|__getitem__|collate|preprocess"),
        ("training", r"train(ing)?_(step|batch)|(^|_)train_(one_)?epoch"),
    )
)
# Matches the text of the line that called into C or Rust.
_BY_SOURCE: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        ("tokenising", r"\bencode_batch\(|\btoken(izer|iser)\b.*\(|\.encode_ordinary_batch\("),
        (
            "saving a checkpoint",
            r"\btorch\.save\(|\bsave_file\(|\.save_pretrained\(|\.save_checkpoint\(|\b(pickle|joblib)\.dump\(",
        ),
        ("loading a checkpoint", r"\btorch\.load\(|\bload_file\(|\.load_state_dict\("),
        ("loading a model or data set", r"from_pretrained\(|load_dataset\(|snapshot_download\(|hf_hub_download\("),
        (DOWNLOADING, r"urlretrieve\(|urlopen\(|requests\.(get|post)\("),
        (
            "building the model",
            r"\bnn\.(Sequential|Linear|Conv\w+|Embedding|Transformer\w*|ModuleList|Parameter|LSTM|GRU)\(",
        ),
        ("in the backward pass", r"\.backward\("),
        (OPTIMIZER_STEP, r"\b(optim\w*|opt)\.step\(|\bscaler\.step\("),
        (GPU_WAIT, r"\.item\(\)|\.cpu\(\)|\.tolist\(\)|synchronize\("),
        (DATA, r"^for .*\bin\b.*load(er)?\b|\bnext\(.*(loader|iter)"),
        ("waiting for the disk", r"\bos\.fsync\("),
    )
)
# Loops over held-out data, by the user's functions and by the trainers that have one.
_EVALUATION = re.compile(r"(^|_)(eval(uate|uation)?|valid(ate|ation)?|test_epoch|estimate_loss)(_|$)")
_EVALUATION_FILES = re.compile(
    r"/(transformers/trainer\w*|(pytorch_)?lightning/\S*evaluation_loop|keras/\S*trainer)\.py"
)
_EVALUATION_LIBRARY = re.compile(
    r"^(evaluate|evaluation_loop|prediction_step|prediction_loop|_evaluate|run|test_step)$"
)


def phase_of(frames: Iterable[Frame], line: Frame | None, *, has_gpu: bool) -> str:
    """The phase that these frames prove; '' when they prove none. `line` is the user's own line."""
    found = tuple(frames)
    phase = _by_library(found, has_gpu) or (_by_source(line, has_gpu) if line is not None else "")
    if phase in ("", FORWARD, DATA, DATA_WAIT, GPU_WAIT) and is_evaluating(found):
        return EVALUATING if not phase else f"{EVALUATING} ({phase.removeprefix('in the ')})"
    return phase or _by_own_functions(found)


def is_evaluating(frames: Iterable[Frame]) -> bool:
    for frame in frames:
        name = bare_function(frame)
        if frame.is_user and _EVALUATION.search(name):
            return True
        if not frame.is_user and _EVALUATION_LIBRARY.match(name) and _EVALUATION_FILES.search(frame.file):
            return True
    return False


def bare_function(frame: Frame) -> str:
    """'Net.__init__' and 'Net.__init__.<locals>.inner' without their class and what encloses them."""
    return frame.function.rpartition(".")[2]


def _by_library(frames: tuple[Frame, ...], has_gpu: bool) -> str:
    # Code at the top level of a module only runs while it is imported.
    library = _library_functions(frames)
    inner = _library_functions(tuple(itertools.takewhile(lambda frame: not frame.is_user, frames)))
    for phase, file, function in _BY_FRAME:
        if phase == GPU_WAIT and not has_gpu:
            continue
        # A user's function inside of an optimizer's step is the closure that it was given, not the update.
        where = inner if phase == OPTIMIZER_STEP else library
        if any(function.search(name) and file.search(path) for path, name in where):
            return phase
    return ""


def _library_functions(frames: tuple[Frame, ...]) -> list[tuple[str, str]]:
    names = [(frame.file, bare_function(frame)) for frame in frames if not frame.is_user]
    return [(file, name) for file, name in names if name != "<module>"]


def _by_source(line: Frame, has_gpu: bool) -> str:
    for phase, pattern in _BY_SOURCE:
        if pattern.search(line.source) and (has_gpu or phase != GPU_WAIT):
            return phase
    return ""


def _by_own_functions(frames: tuple[Frame, ...]) -> str:
    for name in (bare_function(frame) for frame in frames if frame.is_user):
        for phase, pattern in _BY_FUNCTION:
            if pattern.search(name):
                return phase
    return ""

"""Errors in the user's code, its packages or its input: imports, syntax, no keyboard, the script's own exceptions."""

from __future__ import annotations

import itertools
import re

from jackline.diagnosis.deaths.evidence import Cause, Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, place_line, ran_line, short_place
from jackline.diagnosis.deaths.signal import ENDLESS_CALL_HINT
from jackline.diagnosis.deaths.traceback_text import Chain, ErrorText
from jackline.diagnosis.frames import Frame
from jackline.diagnosis.packages import install_hint, package_of
from jackline.extras import requirement

_MISSING = re.compile(r"No module named '?([\w.]+)'?")
_NOT_A_PACKAGE = re.compile(r"'([\w.]+)' is not a package")
_NAME = re.compile(r"cannot import name '([^']+)' from '([^']+)'")
_CIRCULAR = re.compile(r"partially initialized module '([^']+)'")
_SHADOW = re.compile(r"consider renaming '([^']+)'")
_LIBRARY = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")
_BINARY = re.compile(
    r"undefined symbol|version `?(?:GLIBC|GLIBCXX|CXXABI)\w*[^']*' not found"
    r"|compiled using NumPy 1|numpy\.dtype size changed|_ARRAY_API not found"
)
_IMPORTS = ("ModuleNotFoundError", "ImportError")
_TRACEBACK = "Traceback (most recent call last)"
_KEYBOARD = re.compile(r"EOF when reading a line|Inappropriate ioctl for device")
# Patterns as text: they are compiled when an error is explained, not at each start of a supervisor.
_HINTS = (
    (
        r"Communication with the workers|received 0 items of ancdata",
        "raise the limit: ulimit -n 65536; DataLoader workers need fewer files with "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    (
        r"\[Errno 24\]|Too many open files",
        "close files once they are read (`with open(...)`), or raise the limit: ulimit -n 65536",
    ),
    (
        r"\[Errno 98\]|Address already in use|EADDRINUSE",
        "a leftover process holds the port: `jackline doctor` names it, or take another (--master_port)",
    ),
    (
        r"\[Errno 13\]|Permission denied",
        "its user may not do that there: `ls -ld` the path and the folder that holds it; `id` says who you are",
    ),
    (
        r"PytorchStreamWriter failed|basic_ios::clear|unexpected pos \d+|\d+ requested and \d+ written",
        "a full disk, a used-up quota (`quota`), a limit on file sizes (`ulimit -f`) or a folder that was removed "
        "does this: look at where it saves",
    ),
    (
        r"\[Errno 27\]|File too large",
        "a file grew over its limit: `ulimit -f unlimited`, or a file system that allows larger files",
    ),
    (
        # 118, 60 and 123 are the letters v, < and { with which a Git LFS pointer, HTML and JSON begin.
        r"deserializing header|HeaderToo(?:Large|Small)|InvalidHeader|invalid load key"
        r"|Unsupported operand (?:118|60|123)\b",
        "that file is no weights or not whole: a Git LFS pointer of 130 bytes (`git lfs pull`), an error page, a "
        "download or a save that was cut off. Look at its size and head; then fetch it again or use another one",
    ),
    (
        r"failed finding central directory|PytorchStreamReader failed|(?i:metadata ?incomplete ?buffer)"
        r"|checkpoint file is corrupted|Ran out of input",
        "that file is not whole, as after a kill or a full disk during its save: use an older checkpoint",
    ),
    (
        r"Weights only load failed",
        "if you trust the file: torch.load(..., weights_only=False), or allow the type that the message names "
        "(torch.serialization.add_safe_globals)",
    ),
    (
        r"Attempting to deserialize object on a CUDA device",
        "torch.load(..., map_location='cpu')",
    ),
    (
        r"(?s)(?:KeyError: '|(?:Missing|Unexpected) key.*\")(?:module|_orig_mod)\.",
        "one side was wrapped when it was saved: DataParallel and DDP put `module.` in front of the names, "
        "torch.compile `_orig_mod.`; remove or add that, or save the inner model (model.module.state_dict())",
    ),
    (
        r"Error\(s\) in loading state_dict",
        "the checkpoint belongs to a model of another shape: build the model with the settings it was saved with, or "
        "leave the named weights out (strict=False does not skip a size mismatch)",
    ),
    (
        r"Can't (?:pickle|get) (?:local object|attribute|<function)|cannot pickle",
        "a spawned process gets its work by pickle: move the function or class to the top level of a module and pass "
        "no lambda, lock or open file",
    ),
    (
        r"\[Errno 5\]|Input/output error",
        "a disk or a network file system failed: `dmesg | tail` says which; copy the data to another disk",
    ),
    (r"\[Errno 116\]|Stale file handle", "the server of that file system replaced it: mount it again"),
    (r"InvalidCxxCompiler|No working C\+\+ compiler", "torch.compile needs a C++ compiler: install g++"),
    (
        r"Expected more than 1 value per channel",
        "batch norm needs more than one sample: DataLoader(..., drop_last=True), or another batch size",
    ),
    (
        r"\[Errno 2\] No such file|does not exist",
        "look at the path; a relative one begins in the folder where the command was started",
    ),
    (
        r"codec can't decode byte",
        "the file is not in that encoding: open(..., encoding='latin-1'), or find the line with `file` and `iconv`",
    ),
    (r"\[Errno 30\]|Read-only file system", "write to another folder: this one cannot be written"),
    (
        r"Expected all tensors to be on the same device",
        "move the batch, and tensors made inside forward, to the device of the model's parameters",
    ),
    (
        r"Attempting to unscale FP16 gradients",
        "a GradScaler needs fp32 weights: load the model in float32 under autocast, or use bf16 without a scaler",
    ),
    (
        r"does not require grad and does not have a grad_fn",
        "nothing in the loss needs a gradient: all weights are frozen, or it went through no_grad, detach or .item()",
    ),
    (
        r"modified by an inplace operation",
        "torch.autograd.set_detect_anomaly(True) prints the forward line whose result was changed in place",
    ),
    (
        r"backward through the graph a second time",
        "detach what is kept from one step to the next (hidden states, losses that are summed)",
    ),
    (
        r"index out of range in self",
        "an id is not below the embedding's num_embeddings: compare the tokenizer's size with the model's vocab_size",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "keep CUDA out of DataLoader workers (datasets and collate on the CPU), or multiprocessing_context='spawn'",
    ),
    (
        r"Recomputed values for the following tensors have different",
        "the forward pass was not the same the second time: look for randomness, caches or global state inside of it",
    ),
    (
        r"Failed to find C compiler",
        "torch.compile and Triton need a C compiler: install gcc, or set CC",
    ),
    (r"OutOfResources: out of resource", "a Triton kernel is too large for this GPU: smaller blocks or num_stages"),
    (
        r"FlashAttention only supports",
        "this GPU is too old for it: attn_implementation='sdpa' (transformers), or scaled_dot_product_attention",
    ),
    (r"Error building extension", "the compiler's own error stands above the traceback: `jackline logs`"),
    (
        r"loss scale (?:reached|already at minimum)",
        "loss or gradients are not finite in fp16: bf16 if the GPU can, a smaller learning rate, clipping",
    ),
    (
        r"module 'numpy' has no attribute",
        "the code was written for an older NumPy: pip install 'numpy<1.24', or a newer release of what calls it",
    ),
    (
        r"yaml\.(?:scanner|parser)\.|TOMLDecodeError",
        "the settings file has an error at the line that the message names (`jackline logs`)",
    ),
    (
        r"JSONDecodeError",
        "the message counts inside that one text: if it is a record of many (JSON Lines), catch the error there and "
        "print file and line number; if it is a whole file, look at its size and head",
    ),
    (
        r"BadZipFile|tarfile\.ReadError|UnidentifiedImageError|Parquet magic bytes|BadGzipFile"
        r"|while decompressing data|Compressed file ended before",
        "a file is damaged, cut off, or of another kind (an error page instead of data?): look at its size and head",
    ),
    (
        r"is not a valid model identifier|DatasetNotFoundError|RepositoryNotFoundError",
        "look at the name and at the folder it may mean; a private or gated one needs a login: `hf auth login`",
    ),
    (
        r"inotify",
        "raise the kernel's limit: sudo sysctl fs.inotify.max_user_watches=524288 (or max_user_instances)",
    ),
    (
        r"HTTP(?:Status)?Error: .{0,20}\b404\b",
        "the server has nothing at that address: look at its spelling, version or branch",
    ),
    (
        r"CalledProcessError",
        "the command failed, not this script: run it by itself; where its output was captured, the error's .stderr "
        "and .stdout hold what it said",
    ),
    (
        r"^AssertionError: $",
        "the condition of that line was false: print what it compares above it, or give it a message "
        "(`assert ok, values`)",
    ),
    (
        r"\(404\) when calling|NoSuchKey|NoSuchBucket",
        "no such object: look at the bucket, the key and the region",
    ),
    (
        r"database is locked",
        "another connection holds it: one of this script whose transaction is not committed, or of another process, "
        "as an earlier run that still lives (`jackline runs`, `lsof FILE`)",
    ),
    (
        r"unable to lock file",
        "another process has it open: an earlier run that still lives? `jackline runs`, `lsof FILE`",
    ),
    (
        r"contains NaN",
        "the data has gaps or a division by zero: find them before this line (numpy.isnan(x).any())",
    ),
    (
        r"shapes cannot be multiplied|must match the size of tensor|not aligned: |could not be broadcast together"
        r"|but got \d+ channels|expected input\[|shape .{1,60} is invalid for input of size",
        "two shapes do not fit together at that line: print x.shape above it; the message names both",
    ),
    (
        r"(?i)\bloss\b.{0,40}\b(?:nan|-?inf)\b|\b(?:nan|-?inf)\b.{0,40}\bloss\b|non-finite (?:loss|gradient)",
        "the training diverged: a lower learning rate, clipped gradients, bf16 instead of fp16; "
        "torch.autograd.set_detect_anomaly(True) names the first operation that gave nan",
    ),
)
_BOOTSTRAP = re.compile(r"bootstrapping phase|context has already been set")
_OURS = re.compile(r"/(?:src|site-packages|dist-packages)/jackline/")
SEE_LOG = "`jackline logs` shows the whole traceback; run the same command again once it is fixed"


def own_error(error: ErrorText, evidence: Evidence) -> Finding | None:
    """An error of ours, from `attach` in the user's script: it says itself what is wrong and what to do."""
    if not error.kind.startswith("jackline.") or not error.message.startswith("error: "):
        return None
    first = error.message.splitlines()[0]
    at = next((at for at, line in enumerate(evidence.output_tail) if line.endswith(first)), None)
    below = evidence.output_tail[at + 1 :] if at is not None else ()
    hint = next((line.removeprefix("hint: ") for line in below if line.startswith("hint: ")), SEE_LOG)
    more = itertools.takewhile(lambda line: line.startswith("       "), below)
    theirs = [frame for frame in error.frames if frame.is_user and not _OURS.search(frame.file)]
    place = theirs[-1] if theirs else None
    detail = (*(line.strip() for line in more), *place_line(place), *ran_line(evidence))
    cause: Cause = "import_error" if error.name == "MissingPackage" else "own_exception"
    return Finding(cause, "certain", first.removeprefix("error: "), detail, hint, place=place)


def import_error(error: ErrorText, evidence: Evidence) -> Finding | None:
    if error.name not in _IMPORTS and not _LIBRARY.search(error.text) and not _BINARY.search(error.text):
        return None
    title, hint = _import_story(error)
    return Finding(
        "import_error",
        "certain",
        f"{title}{at_place(error.place)}",
        (*place_line(error.place), error.first_line[:240], *ran_line(evidence)),
        hint,
        place=error.place,
    )


def _import_story(error: ErrorText) -> tuple[str, str]:
    text = error.message
    circular, shadow, library = _CIRCULAR.search(text), _SHADOW.search(text), _LIBRARY.search(text)
    if shadow:
        return f"a file of yours hides a package: {shadow[1]}", f"rename {shadow[1]}"
    if circular:
        return (
            f"a circular import: '{circular[1]}' is imported while it is still being imported",
            "move one of the two imports into the function that needs it",
        )
    if library:
        return (
            f"the library {library[1]} is missing",
            f"install the package that brings {library[1]}, or set LD_LIBRARY_PATH",
        )
    if "GLIBC" in text or "CXXABI" in text:
        return (
            "a package needs a newer C or C++ library than this one",
            "in a conda environment: conda install -c conda-forge libstdcxx-ng, and put its lib folder first in "
            "LD_LIBRARY_PATH; for GLIBC itself, a build for an older system or a newer system",
        )
    if _BINARY.search(text):
        return (
            "a package does not fit the others it was built for",
            "install versions that belong together: pip check",
        )
    name = _NAME.search(text)
    if name:
        package = name[2].split(".")[0]
        return f"'{name[2]}' has no '{name[1]}'", f"its version is another than the code wants: pip show {package}"
    return _missing_module(text)


def _missing_module(text: str) -> tuple[str, str]:
    missing, not_package = _MISSING.search(text), _NOT_A_PACKAGE.search(text)
    if not_package:
        return f"'{not_package[1]}' is not a package", f"a file named {not_package[1]}.py hides it: rename that file"
    if missing is None:
        return "an import failed", "install or update the package it names: pip install -U PACKAGE"
    module = missing[1]
    top = module.split(".")[0]
    if "." in module and module != "google.protobuf":
        return f"there is no module '{module}'", f"{top} may have another version than the code wants: pip show {top}"
    if top == "jackline":
        return f"the package '{module}' is not installed", f"pip install {requirement('train')}"
    if package_of(module) is None:
        return f"Python found no module '{module}'", install_hint(module)
    return f"the package '{module}' is not installed", install_hint(module)


def no_main_guard(error: ErrorText, evidence: Evidence) -> Finding | None:
    """A child that is spawned runs the script again to know its functions. Whatever fails in that second run, the
    script started a process while it was being imported."""
    again = next((at for at, frame in enumerate(error.frames) if _runs_script_again(frame)), None)
    if again is None:
        return None
    outside = [frame for frame in error.frames[again:] if frame.is_user]
    starts_anew = _BOOTSTRAP.search(error.text) or any(
        "/multiprocessing/" in frame.file for frame in error.frames[again + 1 :]
    )
    if not outside or not starts_anew:
        return None
    place = outside[0]
    return Finding(
        "own_exception",
        "certain",
        f"the script starts processes while it is imported{at_place(place)}: `if __name__ == '__main__':` is missing",
        (*place_line(place), error.first_line[:200], *ran_line(evidence)),
        "put what starts the training below `if __name__ == '__main__':`: each spawned process imports the script",
        place=place,
    )


def _runs_script_again(frame: Frame) -> bool:
    return frame.function in ("_fixup_main_from_path", "_fixup_main_from_name")


def syntax_error(error: ErrorText, evidence: Evidence) -> Finding | None:
    if error.name not in ("SyntaxError", "IndentationError", "TabError"):
        return None
    place = error.place
    hint = f"fix {place.file}:{place.line}" if place else "fix the line it names"
    title = f"{error.first_line}{at_place(place)}"
    return Finding("syntax_error", "certain", title, (*place_line(place), *ran_line(evidence)), hint, place=place)


def keyboard_input(error: ErrorText, evidence: Evidence) -> Finding | None:
    is_input = error.name == "EOFError" and _KEYBOARD.search(error.message)
    if not is_input and error.name != "StdinNotImplementedError":
        return None
    return Finding(
        "keyboard_input",
        "certain",
        f"it asked for keyboard input and had none{at_place(error.place)}",
        (*place_line(error.place), *ran_line(evidence)),
        "start it with `jackline run --tty`, or give the answer as an option or through a pipe",
        place=error.place,
    )


def _last_words(chain: Chain, evidence: Evidence) -> tuple[str, ...]:
    """Quotes the program's last line, because it may print a traceback, continue and end for another reason.
    Launchers and Python itself add tracebacks of their own afterwards; those do not count."""
    lines = [line.strip() for line in evidence.output_tail if re.search(r"\w", line)]  # no frames of boxes
    later = evidence.output_tail[chain.end :]
    is_told = any(lines and lines[-1].endswith(error.first_line) for error in chain.errors)
    if not lines or is_told or any(_TRACEBACK in line for line in later):
        return ()
    return (f"its last line: {lines[-1][:200]}",)


def own_exception(chain: Chain, evidence: Evidence) -> Finding:
    """If no other rule matches: an error that only the script's author can explain, with the line that raised it."""
    root = chain.root
    place = root.place
    later = [error for error in chain.errors[1:] if error.first_line != root.first_line]
    after = (f"then: {later[-1].first_line[:200]}{at_place(later[-1].place)}",) if later else ()
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, root.text)), SEE_LOG)
    if root.name == "RecursionError":
        hint = ENDLESS_CALL_HINT
    where = f" ({short_place(place)})" if place else ""
    last_words = _last_words(chain, evidence)
    is_last = not any(line.strip() for line in evidence.output_tail[chain.end :])
    return Finding(
        "own_exception",
        "certain" if is_last or not last_words else "likely",
        f"{root.first_line[:300]}{where}",
        (*place_line(place), *after, *last_words, *ran_line(evidence)),
        hint,
        place=place,
    )

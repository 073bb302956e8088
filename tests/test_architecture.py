"""The house rules that a machine can hold: import direction, the torch-free half, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.deadline import HANGS_S

# Every file is parsed once, in one worker.
pytestmark = pytest.mark.xdist_group("architecture")

ROOT = Path(__file__).parents[1] / "src" / "jackline"

# Low to high. Imports go downwards only, never sideways.
LEVELS = {
    "errors": 0,
    "immutable": 0,
    "units": 0,
    "pipes": 0,
    "extras": 1,
    "settings": 1,
    "accelerator": 1,
    "rundir": 1,
    "machine": 1,
    "diagnosis": 2,
    "checkpoint": 2,
    "data": 2,
    "memory": 2,
    "models": 2,
    "review": 3,
    "supervisor": 4,
    "session": 4,
    "dashboard": 4,
    "exporters": 4,
    "trainer": 5,
    "recipes": 6,
    "cli": 7,
    "notebook": 8,
}
# The exceptions, each with its reason.
SIDEWAYS = {("units", "errors")}  # a wrong duration is a usage error

TORCH_FREE_PACKAGES = (
    "cli",
    "supervisor",
    "machine",
    "rundir",
    "diagnosis",
    "review",
    "dashboard",
    "exporters",
    "notebook",
)
TORCH_FREE_ROOMS = ("checkpoint/format", "checkpoint/writer", "checkpoint/mirror")
HEAVY = {"torch", "numpy", "safetensors", "tokenizers", "pyarrow", "pydantic", "rich", "starlette", "uvicorn"}

MAX_FILE_LINES = 400
MAX_MODULES = 16  # in one folder
SMALL_LINES = 100
MAX_SMALL_WITH_ONE_IMPORTER = 15
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {("trainer/loop.py", "train"): 120}


@cache
def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(path: Path) -> str:
    return ".".join(("jackline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            yield node.module or ""
            if node.module == "jackline":
                yield from (f"jackline.{alias.name}" for alias in node.names)


def test_imports_go_downwards_only() -> None:
    wrong = [text for path in modules() for text in upward_imports(path)]
    assert not wrong, "\n".join(wrong)


def upward_imports(path: Path) -> Iterator[str]:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    for name in imported_names(path):
        words = name.split(".")
        if words[0] != "jackline" or len(words) < 2 or words[1] not in LEVELS:
            continue
        other = words[1]
        if other != part and (part, other) not in SIDEWAYS and LEVELS[other] >= LEVELS[part]:
            yield f"{path.relative_to(ROOT)} imports {name}: {part} is not above {other}"


def needed_modules(path: Path, known: set[str]) -> set[str]:
    """Modules of ours that this one imports when it runs, also inside functions; not those for types alone."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= known else (names & known) | {node.module or ""}
        else:
            waiting += ast.iter_child_nodes(node)
    return found & known


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """What is left when modules that need nothing of the rest are taken away, again and again; empty: no cycle."""
    left = dict(edges)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    while free := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_module_needs_itself_by_way_of_others() -> None:
    """An import inside a function hides a cycle from Python, not from a reader."""
    paths = {dotted(path): path for path in modules()}
    edges = {name: needed_modules(path, set(paths)) - {name} for name, path in paths.items()}
    assert sum(map(len, edges.values())) > 1000  # the graph was really read
    assert find_cycle(edges) == []


@pytest.mark.parametrize(
    ("edges", "cycle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}, ["b", "c"]),
    ],
)
def test_a_cycle_is_found(edges: dict[str, set[str]], cycle: list[str]) -> None:
    assert find_cycle(edges) == cycle


def test_a_folder_holds_at_most_sixteen_modules() -> None:
    folders = Counter(path.parent for path in modules() if path.name not in ("__init__.py", "__main__.py"))
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MAX_MODULES}
    assert not crowded, f"more than {MAX_MODULES} modules: {crowded}; make rooms, each with one idea"


def test_every_folder_has_a_level() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders <= set(LEVELS), f"new folders without a level: {folders - set(LEVELS)}"


def torch_free_modules() -> list[str]:
    names = []
    for path in modules():
        relative = path.relative_to(ROOT)
        # These two run in the user's own processes and are not imported by ours.
        is_ours = not {"inject", "inside"} & set(relative.parts)
        inside = relative.parts[0] in TORCH_FREE_PACKAGES and is_ours
        engine = str(relative.parent) in TORCH_FREE_ROOMS
        top = len(relative.parts) == 1 and relative.stem != "__init__"
        if inside or engine or top:
            names.append(".".join(("jackline", *relative.with_suffix("").parts)).removesuffix(".__init__"))
    return names


def test_the_torch_free_half_imports_nothing_heavy() -> None:
    names = [name for name in torch_free_modules() if not name.endswith("__main__")]
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_supervisor_lives_without_openssl_and_statistics() -> None:
    """They would take 4.5 MB beside every training, for its whole life."""
    code = (
        "import sys\nimport jackline.supervisor.__main__\n"
        "print(sorted(set(sys.modules) & {'_hashlib', 'statistics', 'decimal', 'ssl', 'email', 'asyncio'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_stay_small() -> None:
    long = {str(path.relative_to(ROOT)): num_lines(path) for path in modules() if num_lines(path) > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}; find the second idea"


def test_functions_stay_small() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                allowed = LONG_FUNCTIONS.get((str(path.relative_to(ROOT)), node.name), MAX_FUNCTION_LINES)
                if length > allowed:
                    wrong.append(f"{path}: {node.name} has {length} lines, at most {allowed}")
    assert not wrong, "\n".join(wrong)


def test_a_module_opens_by_saying_what_it_owns() -> None:
    silent = [str(path.relative_to(ROOT)) for path in modules() if not ast.get_docstring(parsed(path))]
    assert not silent, f"no docstring: {silent}"


def named_modules(path: Path, known: set[str]) -> set[str]:
    """Modules of ours that this one imports or names in a string, such as a command that is imported on use."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & known


def test_few_small_modules_have_a_single_importer() -> None:
    """Such a module is one more file to open and no boundary: it belongs into its importer, or to a neighbour."""
    names = {dotted(path) for path in modules()}
    importers = Counter(name for path in modules() for name in named_modules(path, names) - {dotted(path)})
    small = sorted(
        f"{dotted(path)} ({num_lines(path)} lines)"
        for path in modules()
        if path.name not in ("__init__.py", "__main__.py")
        and importers[dotted(path)] == 1
        and num_lines(path) < SMALL_LINES
    )
    assert len(small) <= MAX_SMALL_WITH_ONE_IMPORTER, f"{len(small)} small modules with one importer: {small}"


# Kernels of one vendor, and settings of its libraries.
_FOR_ONE_VENDOR = {
    "accelerator.py", "trainer/optim/adamw_kernel.py", "checkpoint/state/environment.py", "trainer/doctor/examine.py",
    "supervisor/child/inside/gpu_memory.py",  # runs in the user's process, which may have no Jackline to import
}  # fmt: skip


def test_one_module_knows_what_torch_calls_a_gpu() -> None:
    """Another vendor's devices are then one change."""
    found = {str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.py")) if _asks_for_cuda(path)}
    assert found <= _FOR_ONE_VENDOR


def _asks_for_cuda(path: Path) -> bool:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            return True
        if isinstance(node, ast.Compare) and "'cuda'" in map(ast.unparse, node.comparators):
            return True
    return False


def test_no_pickle_anywhere() -> None:
    for path in modules():
        assert not {"pickle", "cloudpickle", "dill"} & set(imported_names(path)), f"{path} imports pickle"


# Packages that read run folders, which may be damaged or forged. They open files through rundir/access alone.
READERS = (
    "rundir",
    "cli",
    "review",
    "dashboard",
    "diagnosis/deaths",
    "diagnosis/logs",
    "notebook",
    "trainer/trained",
    "checkpoint/format",
    "checkpoint/mirror",
)
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch"}
# What these open is not a file of a run: /proc, a device, a new file (O_EXCL), a folder that is synced.
OTHER_FILES = {
    "rundir/access/reading.py",
    "rundir/access/writing.py",
    "rundir/access/trust.py",  # /proc
    "rundir/process_id.py",  # /proc
    "rundir/atomic.py",  # syncs folders
    "cli/main.py",  # /dev/null
    "dashboard/server.py",  # the pages that come with Jackline
    "dashboard/guard.py",  # the new file of its token
    "cli/view/screen.py",  # /proc
    "cli/commands/demo.py",  # the files that the demo itself has made
    "cli/pages/report.py",  # the report that it writes
    "notebook/look.py",  # the same
    "notebook/place.py",  # a probe file in a mounted folder
    "trainer/trained/hf.py",  # the files that it writes for transformers
    "trainer/trained/begin.py",  # a folder of transformers that a person names
    "checkpoint/mirror/store.py",  # new files in a store, and files that are uploaded
    "checkpoint/mirror/upload.py",  # checkpoints of the running training
    "checkpoint/mirror/engine.py",  # the same
    "checkpoint/mirror/fetch.py",  # new files in a draft folder
    "checkpoint/format/export.py",  # new files below --out
}


def opening_calls(path: Path) -> list[int]:
    """Lines that open a file by themselves; a descriptor from rundir/access may be wrapped by open()."""
    found = []
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        is_wrapped = bool(node.args) and isinstance(node.args[0], ast.Call)
        is_other = owner in ("reading", "tarfile", "stream", "feed") or (name == "open" and is_wrapped)
        is_function = isinstance(node.func, ast.Name) and name in ("read_text", "read_bytes", "write_bytes")
        if name in OPENERS and not is_other and not is_function:
            found.append(node.lineno)
    return found


def test_run_files_are_opened_by_the_bounded_functions_alone() -> None:
    wrong = []
    for path in modules():
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(tuple(f"{room}/" for room in READERS)) and place not in OTHER_FILES:
            wrong += [f"{place}:{line}" for line in opening_calls(path)]
    assert not wrong, f"use jackline.rundir.access.reading or .writing: {wrong}"

"""Whether a model is compiled, and the reason a person reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jackline.errors import UsageError
from jackline.trainer.startup import compiling, shared_code
from jackline.trainer.startup.compiling import cache_folder, decide, is_warm, use_cache
from jackline.trainer.startup.precision import autocast, choose_attention, choose_precision, make_scaler
from jackline.trainer.startup.process import own_cache
from tests.deadline import HANGS_S

ON_GPU: dict[str, Any] = {"has_gpu": True, "can_compile": "", "eager_step_s": 0.1, "is_warm": False}


@pytest.mark.parametrize(
    ("mode", "facts", "wanted"),
    [
        ("off", {"steps_left": 10**6}, (False, "not compiled: compile=off")),
        ("on", {"steps_left": 1}, (True, "compiled: compile=on")),
        (
            "on",
            {"steps_left": 1, "can_compile": "there is no C compiler on this machine"},
            (False, "not compiled: there is no C compiler on this machine"),
        ),
        (
            "auto",
            {"steps_left": 10**4},
            (True, "compiled: about 20 s for the first time, saves about 6 min in all"),
        ),
        (
            "auto",
            {"steps_left": 500},
            (False, "not compiled: about 20 s for the first time would save only 18 s of what is left"),
        ),
        (
            "auto",
            {"steps_left": 500, "is_warm": True},
            (True, "compiled: about 4 s with the code of an earlier one, saves about 18 s in all"),
        ),
        (
            "auto",
            {"steps_left": 10**6, "has_gpu": False},
            (False, "not compiled: on a CPU it saves little; compile=on does it all the same"),
        ),
    ],
)
def test_compiling_must_pay_for_itself(mode: Any, facts: dict[str, Any], wanted: tuple[bool, str]) -> None:
    made = decide(mode, **{**ON_GPU, **facts})
    assert (made.is_compiled, made.reason) == wanted


def test_the_cache_lies_in_the_run_and_apart_for_each_attention(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    folder = cache_folder(tmp_path, "cudnn")
    assert folder != cache_folder(tmp_path, "flash")
    assert not is_warm(folder)
    use_cache(folder)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    assert not is_warm(folder)
    (folder / "triton" / "ab").mkdir(parents=True)  # a kernel of our own, which needs no compiler
    assert not is_warm(folder)
    (folder / "fxgraph" / "ab").mkdir(parents=True)
    assert is_warm(folder)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


BUILDING = """
import os, sys
from pathlib import Path
from jackline.trainer.build import build
from jackline.trainer.config import resolve
from jackline.trainer.report.console import Console

assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and "torch._inductor" not in sys.modules
words = ["--quick", f"data={sys.argv[1]}/text.txt", "compile=on", f"data_dir={sys.argv[1]}/cache"]
build(resolve("demo", words).config, Console(), Path("run"))
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir(), os.environ["TRITON_CACHE_DIR"])
"""


def test_the_compiler_really_keeps_its_code_in_the_run(tmp_path: Path) -> None:
    """Torch's compiler chooses a folder when it is imported, so it must have been told by then."""
    (tmp_path / "text.txt").write_text("one line after another\n" * 8000)
    without = {word: value for word, value in os.environ.items() if not word.startswith(("TORCHINDUCTOR", "TRITON"))}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", BUILDING, str(tmp_path)],
        env={**without, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANGS_S,
        check=True,
    )
    inductor, triton = done.stdout.splitlines()[-1].split()
    assert inductor.startswith(f"{tmp_path / 'run' / 'compiled'}/plain-")
    assert triton == str(tmp_path / "cache" / "jackline" / "kernels")


# One real compilation on a CPU, in a process with a cache folder of its own, as two runs of a model have.
COMPILING = """
import sys, torch
from jackline.trainer.startup import shared_code
from torch._dynamo.utils import counters
is_there = shared_code.take(sys.argv[1])
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x) * 2
model = Model()
model.compile(dynamic=False)
model(torch.ones(2, 4))
shared_code.give()
print(is_there, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_second_run_of_the_same_model_begins_with_the_code_of_the_first(tmp_path: Path, cache: Path) -> None:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("there is no C compiler on this machine")
    said = []
    for name, key in (("first", "a"), ("second", "a"), ("other", "b")):
        environ = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", COMPILING, key]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=HANGS_S)
        said.append(done.stdout.strip())
        if name == "first":
            shutil.rmtree(tmp_path / "first")  # what the second one needs is not in the first one's folder
    assert said == ["False 0", "True 1", "False 0"]
    assert sorted(path.name for path in cache.iterdir()) == ["a", "b"]


def test_compiled_code_in_a_run_that_somebody_sends_is_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it would be executed. Neither a folder by a known name counts, nor a copy of a run of one's own, nor
    the folder that another person's training has used."""
    compiling._secret.cache_clear()
    mine, sent = tmp_path / "mine", tmp_path / "sent"
    mine.mkdir()
    folder = cache_folder(mine, "flash")
    (folder / "fxgraph" / "ab").mkdir(parents=True)
    (mine / "compiled" / "flash" / "fxgraph" / "ab").mkdir(parents=True)
    shutil.copytree(mine, sent)
    assert is_warm(cache_folder(mine, "flash"))
    assert not is_warm(cache_folder(sent, "flash"))
    moved = mine.rename(tmp_path / "moved")
    assert is_warm(cache_folder(moved, "flash")), "one's own run stays warm where it is moved to"
    compiling._secret.cache_clear()
    assert is_warm(cache_folder(moved, "flash")), "and in the next process"
    compiling._secret.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of-another"))
    assert not is_warm(cache_folder(moved, "flash"))
    compiling._secret.cache_clear()


def test_compiled_code_that_is_damaged_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (cache / "a").write_bytes(bytes(100))
    assert not shared_code.take("a")


def test_the_cache_of_compiled_code_keeps_those_used_last(tmp_path: Path) -> None:
    for number in range(shared_code.MAX_KEPT + 3):
        (tmp_path / str(number)).write_bytes(b"code")
        os.utime(tmp_path / str(number), (1000 + number, 1000 + number))
    shared_code.thin(tmp_path)
    kept = sorted(int(path.name) for path in tmp_path.iterdir())
    assert kept == list(range(3, shared_code.MAX_KEPT + 3))


def test_the_kernels_used_longest_ago_are_deleted(tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / f"kernel{number}"
        folder.mkdir()
        (folder / "code.cubin").write_bytes(b"code")
        os.utime(folder, (1000 + number, 1000 + number))
    shared_code.thin(tmp_path, max_kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel3", "kernel4"]


def test_code_of_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.parent.chmod(0o777)
    assert own_cache("compiled") is None


@pytest.mark.parametrize(
    ("facts", "environ"),
    [
        ({"micro_batch": 4}, {}),
        ({"micro_batch": 8, "precision": "fp32"}, {}),
        ({"micro_batch": 8}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    ],
)
def test_whatever_changes_the_code_changes_its_key(facts: dict[str, object], environ: dict[str, str]) -> None:
    cpu = torch.device("cpu")
    plain = shared_code.key_of({"micro_batch": 8}, cpu, {"TORCHINDUCTOR_CACHE_DIR": "/somewhere", "HOME": "/a"})
    assert plain == shared_code.key_of({"micro_batch": 8}, cpu, {"HOME": "/b"})
    assert plain != shared_code.key_of(facts, cpu, environ)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jackline" / "compiled"


def test_a_cpu_trains_in_float32_and_refuses_fp16() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) == "fp32"
    assert choose_precision("bf16-weights", cpu) == "bf16-weights"
    assert choose_attention("auto", cpu) == "plain"
    assert make_scaler("fp32", cpu) is None
    with pytest.raises(UsageError) as caught:
        choose_precision("fp16", cpu)
    assert str(caught.value) == (
        "error: fp16 needs a GPU: its loss scaling is of no use on a CPU\nhint: use fp32 or bf16"
    )
    with autocast("bf16", cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast("fp32", cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32

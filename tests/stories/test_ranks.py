"""A distributed job under `jackline run`, as a person types it. The launcher here is small, so that no test needs
torch; the slow tests use torchrun itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.shell import Shell

pytestmark = pytest.mark.zoo

# Starts ranks as torchrun does, and reports a failed one in torchrun's words.
LAUNCHER = """
import os, subprocess, sys
size, program = int(sys.argv[1]), sys.argv[2:]
ranks = []
for rank in range(size):
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    ranks.append(subprocess.Popen([sys.executable, *program], env=env))
codes = {rank: one.wait() for rank, one in enumerate(ranks)}
failed = [rank for rank in codes if codes[rank]]
for rank in failed:
    print("E1116 12:00:01.100000 4000 torch/distributed/elastic/multiprocessing/api.py:1003] failed", file=sys.stderr)
for rank in failed[-1:]:
    print("Root Cause (first observed failure):", file=sys.stderr)
    print(f"  rank      : {rank} (local_rank: {rank})", file=sys.stderr)
    print(f"  exitcode  : {codes[rank]} (pid: {ranks[rank].pid})", file=sys.stderr)
sys.exit(1 if failed else 0)
"""
# Rank 2 fails; the others notice that and say only so, as gloo does.
FAILS = """
import os, time
rank = int(os.environ["RANK"])
print("hello from rank", rank)
if rank == 2:
    open("failed", "w").close()
    raise ValueError("boo")
while not os.path.exists("failed"):
    time.sleep(0.01)
raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2")
"""


def test_rank_0_is_on_the_screen_and_the_first_failure_explains_the_job(shell: Shell) -> None:
    (shell.work / "train.py").write_text(FAILS)
    done = shell.jackline("run", "--name", "job", "--", *shell.python("launch.py", LAUNCHER), "3", "train.py")
    assert done.code == 1
    assert "hello from rank 0" in done.out
    assert "hello from rank 1" not in done.out
    assert "torch/distributed/elastic" not in done.out
    assert "rank 2 of 3: ValueError: boo" in done.err
    assert "line 7, in <module>\n" in done.err  # its own traceback, though that rank is not on the screen
    assert "left out here: 3 lines of the launcher about failed ranks" in done.err
    assert "hint: `jackline logs --rank 2` shows the whole traceback" in done.err

    why = shell.jackline("why", "job")
    assert "rank 2 of 3: ValueError: boo (train.py:7)" in why.out
    assert "the other 2 ranks ended because of it" in why.out
    assert shell.jackline("logs", "job", "--rank", "1").out.startswith("hello from rank 1\n")
    missing = shell.jackline("logs", "job", "--rank", "7")
    assert "has no output of rank 7: it has ranks 0-2" in missing.err

    exit_file = json.loads((shell.run_dir("job").path / "attempts/001/exit.json").read_text())
    assert [end["rank"] for end in exit_file["evidence"]["ranks"]] == [0, 1, 2]
    assert (shell.run_dir("job").path / "attempts/001/ranks/rank-2.out").read_text().startswith("hello from rank 2\n")


def test_every_rank_is_on_the_screen_when_asked_for(shell: Shell) -> None:
    (shell.work / "train.py").write_text("import os; print('hello from rank', os.environ['RANK'])")
    launch = shell.python("launch.py", LAUNCHER)
    done = shell.jackline("run", "--all-ranks", "--", *launch, "2", "train.py")
    assert done.code == 0
    assert sorted(done.out.splitlines()) == ["hello from rank 0", "hello from rank 1"]


# As srun starts the tasks of one machine, and ends the others when one has failed (--kill-on-bad-exit).
SRUN = """
import os, signal, subprocess, sys
size, program = int(sys.argv[1]), sys.argv[2:]
tasks = []
for rank in range(size):
    env = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(size)}
    tasks.append(subprocess.Popen([sys.executable, *program], env=env))
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
while all(one.poll() is None for one in tasks):
    pass
failed = next(rank for rank, one in enumerate(tasks) if one.poll() is not None)
for one in tasks:
    if one.poll() is None:
        one.send_signal(signal.SIGTERM)
print(f"srun: error: node1: task {failed}: Exited with exit code {tasks[failed].returncode}", file=sys.stderr)
sys.exit(max(one.wait() for one in tasks))
"""


def test_tasks_of_srun_are_ranks_and_the_first_failure_is_told(shell: Shell) -> None:
    source = "import os, time\nrank = os.environ['SLURM_PROCID']\nprint('hello from rank', rank, flush=True)\n"
    source += "open(f'here-{rank}', 'w').close()\n"
    source += "while not all(os.path.exists(f'here-{one}') for one in range(3)):\n    time.sleep(0.01)\n"
    source += "if rank == '1':\n    raise ValueError('boo')\ntime.sleep(1000)\n"
    (shell.work / "train.py").write_text(source)
    done = shell.jackline("run", "--name", "job", "--", *shell.python("srun.py", SRUN), "3", "train.py")
    assert done.code != 0
    assert "rank 1 of 3: ValueError: boo (train.py:8)" in done.err
    assert "hello from rank 2" not in done.out
    assert shell.jackline("logs", "job", "--rank", "2").out == "hello from rank 2\n"


# As much of torch as mp.spawn and a process group are made of, so that the test needs no torch.
TORCH_PARTS = {
    "torch/__init__.py": "__version__ = '2.13.0'\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/distributed_c10d.py": """
place = {}
def init_process_group(rank, world_size):
    place.update(rank=rank, size=world_size)
def get_rank():
    return place["rank"]
def get_world_size():
    return place["size"]
""",
    "torch/multiprocessing/__init__.py": "from torch.multiprocessing.spawn import spawn\n",
    "torch/multiprocessing/spawn.py": """
import multiprocessing, sys, traceback
def _wrap(fn, i, args, failed):
    try:
        fn(i, *args)
    except Exception:
        failed.put((i, traceback.format_exc()))
        sys.exit(1)
def spawn(fn, args=(), nprocs=1):
    context = multiprocessing.get_context("spawn")
    failed = context.SimpleQueue()
    ranks = [context.Process(target=_wrap, args=(fn, i, args, failed)) for i in range(nprocs)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    if not failed.empty():
        i, text = failed.get()
        raise Exception("\\n\\n-- Process %d terminated with the following error:\\n%s" % (i, text))
""",
}
SPAWNS = """
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as dist

def main(rank, size):
    dist.init_process_group(rank, size)
    print("hello from rank", rank, flush=True)
    if rank == 2:
        raise ValueError("boo")

if __name__ == "__main__":
    mp.spawn(main, (3,), nprocs=3)
"""


def test_processes_of_mp_spawn_are_ranks_with_files_of_their_own(shell: Shell) -> None:
    for name, text in TORCH_PARTS.items():
        (shell.work / name).parent.mkdir(parents=True, exist_ok=True)
        (shell.work / name).write_text(text)
    done = shell.jackline("run", "--name", "job", "--", *shell.python("train.py", SPAWNS))
    assert "hello from rank 0" in done.out
    assert "hello from rank 1" not in done.out
    assert "error: rank 2 of 3: ValueError: boo (train.py:9)" in done.err
    assert shell.jackline("logs", "job", "--rank", "1").out == "hello from rank 1\n"


# -- torchrun and its relatives ----------------------------------------------------------------------------------

TORCH = pytest.mark.skipif(not (Path(sys.executable).parent / "torchrun").exists(), reason="needs torchrun")
DISTRIBUTED = (Path(__file__).parent.parent / "programs" / "ranks" / "fails.py").read_text()
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    "module": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate": [
        *(str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}
FAILURES = {
    "exception": "ValueError: boo",
    "sigkill": "killed",
    "oom": "memory",
    "import": "no_such_module_xyz",
    "assert": "AssertionError: loss must be positive",
    "shape": "shapes cannot be multiplied",
    "timeout": "waited 5 s in all_reduce for rank 2, which never came",
    "nan": "ended with exit code 1",
    "exit3": "ended with exit code 3",
    "segfault": "segmentation fault",
    "file": "FileNotFoundError",
    "abort": "SIGABRT",
}
FOUR = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "4"]


@pytest.mark.slow
@TORCH
@pytest.mark.parametrize("kind", FAILURES)
def test_the_first_failure_among_ranks_of_torchrun(shell: Shell, kind: str) -> None:
    (shell.work / "train.py").write_text(DISTRIBUTED)
    done = shell.jackline("run", "--name", "job", "--", *FOUR, "train.py", kind, "2")
    assert done.code != 0
    error = done.err[done.err.index("error: ") :]
    # All ranks fail alike at an import, and ranks that wait in vain fail instead of the one that they wait for.
    named = {"import": "", "timeout": "for rank 2"}.get(kind, "rank 2 of 4")
    assert named in error.splitlines()[0], error
    assert FAILURES[kind].lower() in error.lower()
    assert "ChildFailedError" not in done.out


@pytest.mark.slow
@TORCH
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_every_launcher_are_recognised(shell: Shell, launcher: str) -> None:
    (shell.work / "train.py").write_text(DISTRIBUTED)
    done = shell.jackline("run", "--name", "job", "--", *LAUNCHERS[launcher], "train.py", "exception")
    assert "rank 1 of 2: ValueError: boo" in done.err
    assert "rank 0 step 3" in done.out
    assert "rank 1 step 3" not in done.out


@pytest.mark.slow
@TORCH
def test_a_port_in_use_is_named(shell: Shell) -> None:
    import socket

    (shell.work / "train.py").write_text("print('never started')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        done = shell.jackline("run", "--", str(BIN / "torchrun"), *words, "train.py")
    assert f"the port {port} is in use already" in done.err


SPAWNED = """
import os, runpy, sys
import torch.multiprocessing as mp

def main(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv.pop())
    runpy.run_path("train.py", run_name="__main__")

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


@pytest.mark.slow
@TORCH
def test_ranks_of_mp_spawn_are_recognised(shell: Shell) -> None:
    import socket

    (shell.work / "train.py").write_text(DISTRIBUTED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = shell.jackline("run", "--name", "job", "--", *shell.python("spawn.py", SPAWNED), "exception", port)
    assert done.code != 0
    assert "ValueError: boo (train.py:20)" in done.err


HANGS = (Path(__file__).parent.parent / "programs" / "ranks" / "hangs.py").read_text()


@pytest.mark.slow
@TORCH
def test_a_stuck_collective_is_explained_by_the_flight_recorder_and_ended(shell: Shell) -> None:
    """torch itself would wait for half an hour."""
    (shell.work / "train.py").write_text(HANGS)
    line = 1 + next(number for number, text in enumerate(HANGS.splitlines()) if "HERE deadlock" in text)
    done = shell.jackline("run", "--on-stuck", "stop", "--", *LAUNCHERS["torchrun"], "train.py", "deadlock")
    assert f"it was stuck at train.py:{line}" in done.err
    assert "STUCK: rank 1 (pid " in done.err
    assert "flight recorder: rank 1 has not made call 5 (all_reduce of Float [4])" in done.err
    assert "torch itself gives up after 30 min" in done.err
    assert "SignalException" not in done.out

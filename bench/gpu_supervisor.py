"""What the supervisor says of programs on a real GPU: an endless kernel, silent work, compiling, out of memory.

    python bench/gpu_supervisor.py                       a few minutes; skips with a line where there is no GPU
    python bench/gpu_supervisor.py "spinning kernel"     only this one

Each program runs under `jackline run` with short thresholds; the table shows expected and seen. A GPU at 100 % is no
nothing: a spinning kernel and real work differ only in power and memory traffic, which is what is tested here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.machine.gpu.watch import read_gpus

SPIN = """
import torch
x = torch.zeros(1, device="cuda")
print("stepping")
torch.cuda._sleep(10**13)
torch.cuda.synchronize()  # HERE
"""
SILENT_WORK = """
import time, torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("stepping")
end = time.monotonic() + 45
while time.monotonic() < end:
    for _ in range(2000):
        x = torch.nn.functional.normalize(x @ x)
    torch.cuda.synchronize()
"""
COMPILING = """
import torch
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(12)]
model = torch.nn.Sequential(*layers).cuda()
compiled = torch.compile(model, mode="max-autotune")
print("compiling")
compiled(torch.randn(64, 256, device="cuda")).sum().backward()
torch.cuda.synchronize()
print("compiled")
"""
OUT_OF_MEMORY = """
import torch
kept = []
while True:
    kept.append(torch.zeros(2**30, device="cuda"))  # HERE
"""


@dataclass(frozen=True)
class Program:
    name: str
    code: str
    expected: str
    watch_s: float


PROGRAMS = (
    Program("spinning kernel", SPIN, "SUSPECT or STUCK at synchronize", 60),
    Program("silent matmuls", SILENT_WORK, "no alarm", 90),
    Program("compiling", COMPILING, "no alarm, 'compiling' said", 180),
    Program("out of memory", OUT_OF_MEMORY, "cuda_oom with sizes", 60),
)


def run_program(program: Program, folder: Path) -> dict[str, Any]:
    """Everything the run directory says after `watch_s`, or after an alarm or the end."""
    script = folder / f"{program.name.replace(' ', '_')}.py"
    script.write_text(program.code)
    run = folder / "runs" / script.stem
    jackline = [sys.executable, "-m", "jackline", "run", "--detach", "--name", script.stem, "--stuck-after", "8"]
    subprocess.run([*jackline, "--", sys.executable, str(script)], cwd=folder, check=True)
    until_s = time.monotonic() + program.watch_s
    state: dict[str, Any] = {}
    said: set[str] = set()
    alarms: list[str] = []
    while time.monotonic() < until_s:
        state = json.loads((run / "supervisor.json").read_text())
        said.add(str((state.get("now") or {}).get("what")))
        verdict = state.get("verdict") or {}
        if verdict.get("kind") in ("STUCK", "SUSPECT"):
            alarms.append(f"{verdict['kind']} {verdict['label']}: {verdict['text']}")
        if state.get("is_finished") or (alarms and verdict.get("for_s", 0) > 12):
            break
        time.sleep(0.5)
    exit_file = run / "attempts" / "001" / "exit.json"
    end = json.loads(exit_file.read_text()) if exit_file.exists() else {}
    if not state.get("is_finished"):
        os.kill(state["child"]["pid"], signal.SIGKILL)
    return {"said": sorted(said), "alarm": alarms[-1] if alarms else "", "end": end, "gpu": state.get("gpu")}


def main() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], capture_output=True
    )
    if found.stdout.strip() != b"True":
        print("skipped: torch sees no GPU here")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        print("power before any context:", [(gpu.power_w, gpu.power_limit_w) for gpu in read_gpus()])
        wanted = sys.argv[1:]
        for program in [one for one in PROGRAMS if not wanted or one.name in wanted]:
            seen = run_program(program, folder)
            print(f"\n== {program.name}\nexpected: {program.expected}")
            print(f"alarm:    {seen['alarm'] or 'none'}")
            print(f"said:     {seen['said']}")
            print(f"gpu:      {seen['gpu']}")
            print(f"end:      {seen['end'].get('cause')}\n{seen['end'].get('text', '')}")


if __name__ == "__main__":
    main()

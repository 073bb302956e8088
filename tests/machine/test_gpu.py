"""Graphics GPUs. Figures are those of real GPUs' texts; the driver that hangs is a real program that hangs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.machine.gpu import watch as gpu
from jackline.machine.gpu.vendors import nvidia
from jackline.machine.gpu.vendors.nvidia import parse_smi
from jackline.machine.gpu.watch import GpuUse, find_source, is_hanging, read_gpus, uses_a_gpu
from jackline.machine.readings import GpuProcess, GpuReading
from tests.deadline import HANGS_S
from tests.machine.conftest import wait_until

GPU_MODELS = """\
GPU-aaaa, 0, NVIDIA H200, 143771, 142241, 87, 22, 691.20, 700.00
GPU-bbbb, 1, Tesla T4, 15360, 15357, [N/A], [N/A], [Not Supported], [Not Supported]
"""
USERS = """\
GPU-aaaa, 4242, 1000
GPU-aaaa, 4243, [N/A]
GPU-cccc, 1, 5
"""


def test_the_two_tables_of_nvidia_smi_become_readings() -> None:
    first, second = parse_smi(GPU_MODELS, USERS)
    assert first == GpuReading(
        index=0,
        name="NVIDIA H200",
        total_bytes=143771 * 2**20,
        used_bytes=1530 * 2**20,
        utilisation_percent=87,
        memory_utilisation_percent=22,
        power_w=691.2,
        processes=(GpuProcess(4242, 1000 * 2**20), GpuProcess(4243, None)),
        power_limit_w=700.0,
    )
    assert second == GpuReading(1, "Tesla T4", 15360 * 2**20, 3 * 2**20, None, None, None)


def test_a_gpu_that_does_not_tell_its_memory_is_listed() -> None:
    (gpu,) = parse_smi("GPU-dddd, 0, NVIDIA GB10, [N/A], [N/A], 5, 1, 12.5, [N/A]\n", "")
    assert (gpu.total_bytes, gpu.used_bytes, gpu.power_w) == (0, 0, 12.5)


def test_text_that_is_no_table_gives_no_gpus() -> None:
    assert parse_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "") == ()
    assert parse_smi("", "") == ()


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "DEVICE_FILES", ("/nonexistent",))
    assert read_gpus() == ()
    assert find_source() == ""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine that seems to have a driver and, as nvidia-smi, a script of ours; nothing is remembered."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nvidia, "DEVICE_FILES", ("/dev/null",))
    monkeypatch.setattr(nvidia, "_import_nvml", lambda: None)
    monkeypatch.setattr(gpu, "_reader", gpu._Reader())
    yield script


def test_without_nvml_the_program_is_asked_and_its_answer_kept_for_a_while(smi: Path) -> None:
    count = smi.parent / "count"
    smi.write_text(
        f"#!/bin/sh\necho x >> {count}\ncase $1 in *gpu_uuid*) printf '{USERS}' ;; *) printf '{GPU_MODELS}' ;; esac\n"
    )
    assert [gpu.name for gpu in read_gpus(20)] == ["NVIDIA H200", "Tesla T4"]
    assert len(read_gpus(20)[0].processes) == 2
    assert count.read_text() == "x\nx\n"
    assert find_source() == "nvidia-smi"


def test_a_driver_that_hangs_costs_one_deadline_and_one_thread(smi: Path) -> None:
    gate = smi.parent / "gate"
    os.mkfifo(gate)
    smi.write_text(f"#!/bin/sh\nread x < {gate}\n")
    assert read_gpus(0.05) == ()
    assert is_hanging()
    before = threading.active_count()
    for _ in range(5):
        assert read_gpus(60) == ()  # would take a minute each if it asked again
    assert threading.active_count() == before
    gate.write_text("go\n")
    gate_again = threading.Thread(target=lambda: gate.write_text("go\n"), daemon=True)
    gate_again.start()  # the second question of the same call
    assert wait_until(lambda: not is_hanging(), "the driver to answer")
    gate_again.join(HANGS_S)


def test_a_failing_program_gives_no_gpus(smi: Path) -> None:
    assert read_gpus(20) == ()
    assert not is_hanging()


def test_neither_nvml_nor_the_program_is_remembered(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.unlink()
    monkeypatch.setenv("PATH", str(smi.parent))
    assert read_gpus(20) == ()
    assert gpu._reader.asks == []
    before = threading.active_count()
    assert read_gpus(20) == ()
    assert threading.active_count() == before


class Library:
    """The part of nvidia-ml-py we call, with a GPU that tells little, as a MIG slice does."""

    class Error(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, gpu: int) -> bytes:
        return b"NVIDIA A100-SXM4-40GB MIG 1g.5gb"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> object:
        return type("Memory", (), {"total": 100, "used": 7})

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> object:
        raise self.Error("Not Supported")

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 61500

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[object]:
        return [type("Process", (), {"pid": 9, "usedGpuMemory": None})]


def test_a_gpu_that_does_not_tell_everything_is_still_read(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_import_nvml", Library)
    assert read_gpus(20) == (
        GpuReading(0, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 100, 7, None, None, 61.5, (GpuProcess(9, None),)),
    )


def test_a_real_gpu_is_read_when_there_is_one() -> None:
    if not gpu.has_device_file():
        pytest.skip("no NVIDIA driver on this machine")
    gpus = read_gpus(20)
    assert gpus
    assert gpus[0].total_bytes > gpus[0].used_bytes >= 0
    assert gpus[0].name != "unknown"


def holding(tmp_path: Path, name: str) -> subprocess.Popen[bytes]:
    """A process with a file of that name mapped, as a library is."""
    path = tmp_path / name
    path.write_bytes(bytes(4096))
    code = "import mmap, sys; file = open(sys.argv[1], 'rb'); held = mmap.mmap(file.fileno(), 0, access=1)"
    code += "; print(1, flush=True); input()"
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize(("name", "is_user"), [("libcuda.so.1", True), ("libm.so", False)])
def test_a_process_uses_a_gpu_when_its_driver_is_loaded(name: str, is_user: bool, tmp_path: Path) -> None:
    with holding(tmp_path, name) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert uses_a_gpu(process.pid) is is_user
        hidden = GpuReading(0, "NVIDIA H200", 100, 50, 87, 22, 600.0)
        seen = GpuReading(0, "NVIDIA H200", 100, 50, 87, 22, 600.0, (GpuProcess(os.getpid(), 1),))
        use = GpuUse()
        assert [gpu.is_ours for gpu in use.mark((hidden, seen), [process.pid], 0.0)] == [is_user, False]
        assert use.mark((seen,), [os.getpid()], 0.0)[0].is_ours
        process.communicate(b"\n")
    assert not uses_a_gpu(process.pid)

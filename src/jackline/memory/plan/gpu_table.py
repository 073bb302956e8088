"""The GPUs people train on, one line each. Data only, no torch.

Memory is what `torch.cuda.get_device_properties` shows, in GiB, or follows from the data sheet. Multiprocessors and
rates are the manufacturer's (sources: docs/guides/gpus.md): dense products in half precision with float32 sums,
in TF32 and in float32 (TFLOP/s), and memory bandwidth (GB/s). Context is what the driver takes in addition to
PyTorch's own figure: measured on an H200, estimated for the others.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    name: str
    usable_gib: float
    compute_capability: int  # 80 for 8.0
    context_gib: float
    processors: int
    bandwidth: float
    half: float
    tf32: float
    single: float
    is_amd: bool = False


ROWS = (
    # Data centre: Pascal to Volta
    Row("T4", 14.56, 75, 0.45, 40, 320, 65, 0, 8.1),
    Row("P100", 15.88, 60, 0.45, 56, 732, 18.7, 0, 9.3),
    Row("V100-16", 15.77, 70, 0.45, 80, 900, 125, 0, 15.7),
    Row("V100-32", 31.73, 70, 0.45, 80, 900, 125, 0, 15.7),
    # Data centre: Ampere
    Row("A2", 14.6, 86, 0.5, 10, 200, 18, 9, 4.5),
    Row("A10", 22.06, 86, 0.5, 72, 600, 125, 62.5, 31.2),
    Row("A10G", 22.06, 86, 0.5, 80, 600, 70, 35, 35),
    Row("A16", 14.6, 86, 0.5, 10, 200, 18, 9, 4.5),
    Row("A30", 23.5, 80, 0.5, 56, 933, 165, 82, 10.3),
    Row("A40", 44.34, 86, 0.5, 84, 696, 149.7, 74.8, 37.4),
    Row("A100-40", 39.38, 80, 0.6, 108, 1555, 312, 156, 19.5),
    Row("A100-80", 79.14, 80, 0.6, 108, 2039, 312, 156, 19.5),
    # Data centre: Ada
    Row("L4", 22.03, 89, 0.5, 58, 300, 121, 60, 30.3),
    Row("L40", 44.31, 89, 0.5, 142, 864, 181, 90.5, 90.5),
    Row("L40S", 44.31, 89, 0.5, 142, 864, 362, 183, 91.6),
    # Data centre: Hopper
    Row("H20", 95.0, 90, 0.76, 78, 4000, 148, 74, 44),
    Row("H100", 79.10, 90, 0.76, 132, 3350, 989, 494, 67),
    Row("H100-PCIe", 79.10, 90, 0.76, 114, 2000, 756, 378, 51),
    Row("H100-NVL", 93.1, 90, 0.76, 132, 3938, 835, 417, 60),
    Row("H200", 139.72, 90, 0.76, 132, 4800, 989, 494, 67),
    Row("GH200", 94.5, 90, 0.76, 132, 4000, 989, 494, 67),
    # Data centre: Blackwell
    Row("B100", 178.3, 100, 0.9, 148, 8000, 1750, 875, 60),
    Row("B200", 178.3, 100, 0.9, 148, 8000, 2250, 1125, 75),
    Row("GB200", 184.0, 100, 0.9, 148, 8000, 2500, 1250, 80),
    Row("B300", 267.0, 103, 0.9, 148, 8000, 2500, 1250, 75),
    # Workstations
    Row("RTXA4000", 15.7, 86, 0.5, 48, 448, 76.7, 38.3, 19.2),
    Row("RTXA5000", 23.7, 86, 0.5, 64, 768, 111, 55.6, 27.8),
    Row("RTXA6000", 47.4, 86, 0.5, 84, 768, 154.8, 77.4, 38.7),
    Row("RTX6000Ada", 47.4, 89, 0.5, 142, 960, 364, 182, 91.1),
    Row("RTXPRO6000", 94.97, 120, 0.6, 188, 1792, 503, 251, 125),
    # GeForce: half of the half-precision rate of a workstation, because sums are in float32
    Row("RTX2080Ti", 10.75, 75, 0.45, 68, 616, 53.8, 0, 13.4),
    Row("RTX3060", 11.77, 86, 0.5, 28, 360, 25.5, 12.7, 12.7),
    Row("RTX3070", 7.77, 86, 0.5, 46, 448, 40.6, 20.3, 20.3),
    Row("RTX3080", 9.77, 86, 0.5, 68, 760, 59.5, 29.8, 29.8),
    Row("RTX3080Ti", 11.77, 86, 0.5, 80, 912, 68, 34.1, 34.1),
    Row("RTX3090", 23.69, 86, 0.5, 82, 936, 71, 35.6, 35.6),
    Row("RTX3090Ti", 23.69, 86, 0.5, 84, 1008, 80, 40, 40),
    Row("RTX4060", 7.62, 89, 0.5, 24, 272, 30.2, 15.1, 15.1),
    Row("RTX4060Ti-8", 7.62, 89, 0.5, 34, 288, 44.1, 22.1, 22.1),
    Row("RTX4060Ti-16", 15.6, 89, 0.5, 34, 288, 44.1, 22.1, 22.1),
    Row("RTX4070", 11.6, 89, 0.5, 46, 504, 58.3, 29.1, 29.1),
    Row("RTX4070Super", 11.6, 89, 0.5, 56, 504, 71, 35.5, 35.5),
    Row("RTX4070TiSuper", 15.6, 89, 0.5, 66, 672, 88.2, 44.1, 44.1),
    Row("RTX4080", 15.7, 89, 0.5, 76, 717, 97.5, 48.7, 48.7),
    Row("RTX4080Super", 15.7, 89, 0.5, 80, 736, 104.4, 52.2, 52.2),
    Row("RTX4090", 23.52, 89, 0.5, 128, 1008, 165.2, 82.6, 82.6),
    Row("RTX5060Ti-8", 7.5, 120, 0.5, 36, 448, 47.4, 23.7, 23.7),
    Row("RTX5060Ti-16", 15.5, 120, 0.5, 36, 448, 47.4, 23.7, 23.7),
    Row("RTX5070", 11.5, 120, 0.5, 48, 672, 61.7, 30.9, 30.9),
    Row("RTX5070Ti", 15.5, 120, 0.5, 70, 896, 87.9, 43.9, 43.9),
    Row("RTX5080", 15.5, 120, 0.5, 84, 960, 112.6, 56.3, 56.3),
    Row("RTX5090", 31.4, 120, 0.5, 170, 1792, 209.5, 104.8, 104.8),
    # AMD: the rules for kernels are those of NVIDIA's, so a plan is an estimate
    Row("MI210", 63.9, 80, 0.6, 104, 1638, 181, 0, 45.3, is_amd=True),
    Row("MI250X", 63.9, 80, 0.6, 110, 1638, 191.5, 0, 47.9, is_amd=True),
    Row("MI300X", 191.5, 80, 0.9, 304, 5300, 1307, 653, 163.4, is_amd=True),
    Row("MI325X", 255.5, 80, 0.9, 304, 6000, 1307, 653, 163.4, is_amd=True),
    Row("MI355X", 287.5, 80, 0.9, 256, 8000, 2300, 1150, 157.3, is_amd=True),
)

# A name that stands for several sizes means the smallest: a plan must never say "fits" when it does not.
SHORT_NAMES = {
    "v100": "V100-16",
    "a100": "A100-40",
    "h100sxm": "H100",
    "rtx6000": "RTX6000Ada",
    "a4000": "RTXA4000",
    "a5000": "RTXA5000",
    "a6000": "RTXA6000",
    "mi250": "MI250X",
    "rtx4060ti": "RTX4060Ti-8",
    "4060ti": "RTX4060Ti-8",
    "rtx5060ti": "RTX5060Ti-8",
    "5060ti": "RTX5060Ti-8",
}
# The table of `--table` without `--gpu`: what people meet most often.
COMMON = ("T4", "RTX3090", "L4", "RTX4090", "RTX5090", "L40S", "A100-40", "A100-80", "H100", "H200", "B200", "MI300X")

"""GPUs: found by name or by size, matched to what the driver says."""

from __future__ import annotations

import pytest

from jackline.errors import UsageError
from jackline.memory.plan.gpus import GIB, GPU_MODELS, find_gpu, match_gpu


@pytest.mark.parametrize("name", GPU_MODELS)
def test_every_gpu_is_found_by_its_name_in_any_writing(name: str) -> None:
    assert find_gpu(name) is find_gpu(name.lower()) is find_gpu(f"NVIDIA {name}") is GPU_MODELS[name]


@pytest.mark.parametrize("text", ["15", "15GiB", "15 gb"])
def test_a_size_is_a_gpu(text: str) -> None:
    gpu = find_gpu(text)
    assert (gpu.usable_bytes, gpu.has_bf16, gpu.is_assumed) == (15 * GIB, True, True)


@pytest.mark.parametrize("text", ["T5", "0", "", "-3"])
def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(text)
    assert str(caught.value).startswith(
        f"error: there is no GPU '{text}' in the table\n       known GPUs: T4, P100, V100-16, V100-32, A2, A10, A10G"
    )
    assert str(caught.value).endswith("or give its memory in GiB: --gpu 15")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("a100", "A100-40", 1),
        ("A100-80GB", "A100-80", 1),
        ("rtx 4090", "RTX4090", 1),
        ("4090", "RTX4090", 1),
        ("GeForce RTX 3080 Ti", "RTX3080Ti", 1),
        ("b200", "B200", 1),
        ("mi300x", "MI300X", 1),
        ("T4 x2", "T4", 2),
        ("2xT4", "T4", 2),
        ("8 x H100", "H100", 8),
        ("A100-80 x4", "A100-80", 4),
        ("V100", "V100-16", 1),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(text: str, name: str, count: int) -> None:
    gpu = find_gpu(text)
    assert (gpu.name, gpu.count) == (name, count)


def test_two_gpus_of_a_size() -> None:
    assert (find_gpu("24 x2").usable_bytes, find_gpu("24 x2").count) == (24 * GIB, 2)


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("Tesla T4", 14.6, "T4"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16"),
        ("Tesla V100-SXM3-32GB", 31.7, "V100-32"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.7, "H200"),
        ("NVIDIA A10G", 22.1, "A10G"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40S", 44.3, "L40S"),
        ("NVIDIA L40", 44.3, "L40"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, "RTX4070TiSuper"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX3090"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX6000Ada"),
        ("NVIDIA B200", 178.4, "B200"),
        ("AMD Instinct MI300X", 191.7, "MI300X"),
    ],
)
def test_the_drivers_name_leads_to_the_gpu_and_the_drivers_size_counts(driver: str, gib: float, name: str) -> None:
    gpu = match_gpu(driver, int(gib * GIB))
    assert (gpu.name, gpu.usable_bytes) == (name, int(gib * GIB))


def test_a_gpu_nobody_knows_keeps_its_own_name() -> None:
    gpu = match_gpu("NVIDIA GB999", 200 * GIB)
    assert (gpu.name, gpu.is_assumed) == ("NVIDIA GB999", True)


def test_gpus_before_ampere_train_in_fp16() -> None:
    old = {name for name, gpu in GPU_MODELS.items() if gpu.precision == "fp16"}
    assert old == {"T4", "P100", "V100-16", "V100-32", "RTX2080Ti"}


def test_rates_agree_with_the_table_that_lightning_carries() -> None:
    """Float32 and TF32 of all that both know; half where Lightning gives the rate on tensor cores. Not: H200 with
    sparsity, a pair of H100-NVL as one, an A10G with the figures of an A10, an overclocked RTX2080Ti."""
    throughput = pytest.importorskip("lightning_fabric.utilities.throughput")
    torch = pytest.importorskip("torch")
    wrong = ("h200 sxm1", "h200 nvl1", "h100 nvl", "a10g", "rtx 2080 ti")
    compared = []
    for name, theirs in throughput._CUDA_FLOPS.items():
        known = GPU_MODELS.get(find_name(name.replace(" sxm", "").replace(" pcie", "-pcie")))
        if known is None or name in wrong:
            continue
        compared.append(name)
        ours = {torch.float32: known.rates.single, "tfloat32": known.rates.tf32, torch.float16: known.rates.half}
        has_tensor_cores = theirs[torch.float16] > 2 * theirs[torch.float32]
        for kind in [kind for kind in ours if kind in theirs and (kind != torch.float16 or has_tensor_cores)]:
            assert ours[kind] == pytest.approx(theirs[kind] / 1e12, rel=0.02), (name, kind)
    assert len(compared) >= 17


def find_name(text: str) -> str:
    try:
        return find_gpu(text).name
    except UsageError:
        return ""

"""The simulation in bench/goodput.py: what must hold whatever its assumptions are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "goodput.py"
    spec = importlib.util.spec_from_file_location("bench_goodput", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_goodput"] = module
    spec.loader.exec_module(module)
    return module


def test_without_failures_only_the_stalls_of_saves_are_lost(bench: ModuleType) -> None:
    safe = bench.Cluster(64, 1e-15)
    share = bench.simulate(safe, 600.0, days=1.0, seed=0)
    assert share == pytest.approx(600.0 / (600.0 + safe.stall_s), rel=0.01)


def test_more_ranks_and_later_detection_cost_goodput(bench: ModuleType) -> None:
    rate = bench.RATES["llama3"]
    shares = [bench.goodput(bench.Cluster(ranks, rate), 600.0, days=20.0) for ranks in (512, 4096, 16384)]
    assert shares == sorted(shares, reverse=True)
    late = bench.goodput(bench.Cluster(16384, rate, detect_s=1800.0), 600.0, days=20.0)
    assert late < shares[-1]


def test_the_rate_is_that_of_the_publication(bench: ModuleType) -> None:
    assert bench.Cluster(16384, bench.RATES["llama3"]).mtbf_s == pytest.approx(54 * 86_400 / 419)


def test_a_shard_written_too_late_counts_as_lost(bench: ModuleType) -> None:
    slow = bench.Cluster(8, bench.RATES["llama3"] * 1e5, node_write_rate=1e8, params=70e9)
    assert slow.write_s > 20 * slow.mtbf_s
    assert bench.simulate(slow, 60.0, days=5.0, seed=1) < 0.01

"""How much of the time a large job trains, on paper: a simulation from published failure rates, to 16k ranks.

    python bench/goodput.py                          the table below
    python bench/goodput.py --params 70e9 --ranks 1024,16384 --detect 600

Nothing here was measured on a cluster. The failure rates are published ones; times and bandwidths are assumptions
that can be changed on the command line. For each number of ranks the interval between saves that keeps the most
goodput is searched for by simulation and printed beside Daly's formula.

What is modelled: failures arrive at random (a Poisson process, each ends all ranks); work since the last durable
checkpoint is trained again; a restart costs detection, scheduling and loading; a save stalls the ranks while state is
copied to host memory and becomes durable when its shards are written. What is not: failures that come together,
stragglers, a network that saves share with training, elastic jobs that continue with fewer ranks.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import dataclass, replace

# Unexpected interruptions for each rank (GPU) and hour.
RATES = {
    # 419 in 54 days on 16,384 GPUs: "The Llama 3 Herd of Models" (2024), table 5.
    "llama3": 419 / (54 * 24 * 16_384),
    # 6.5 failures in 1,000 node-days of 8 GPUs: Kokolis et al., "Revisiting Reliability in Large-Scale ML Research
    # Clusters" (2024), RSC-1.
    "rsc1": 6.5 / (1000 * 24 * 8),
}
STATE_BYTES_PER_PARAMETER = 14  # bf16 weights, fp32 master weights, two fp32 moments of Adam
HEARTBEAT_BYTES = 4096  # of one session-RANK.json, each second
DAY_S = 86_400.0


@dataclass(frozen=True)
class Cluster:
    """Assumptions about a job. Times in seconds, rates in bytes a second."""

    ranks: int
    failures_per_rank_hour: float
    params: float = 70e9
    ranks_per_node: int = 8
    copy_rate: float = 10e9  # of one rank, from the GPU to host memory: this stalls training
    node_write_rate: float = 2e9  # of one node, to its disk or its share of the store
    store_rate: float = 200e9  # of all nodes together
    detect_s: float = 60.0  # until the failure is known; without a supervisor, the timeout of the collective
    schedule_s: float = 300.0  # until the ranks run again
    warm_s: float = 60.0  # imports, compilation, the first batch

    @property
    def state_bytes(self) -> float:
        return self.params * STATE_BYTES_PER_PARAMETER

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole job."""
        return 3600.0 / (self.failures_per_rank_hour * self.ranks)

    @property
    def stall_s(self) -> float:
        return self.state_bytes / self.ranks / self.copy_rate

    @property
    def write_s(self) -> float:
        return self.state_bytes / min(self.store_rate, self.nodes * self.node_write_rate)

    @property
    def restart_s(self) -> float:
        return self.detect_s + self.schedule_s + self.write_s + self.warm_s  # reading takes as long as writing


def simulate(cluster: Cluster, every_s: float, *, days: float, seed: int) -> float:
    """The share of the time in which new work was trained. `every_s` is training time between two saves."""
    rng = random.Random(seed)
    end_s, now_s, useful_s = days * DAY_S, 0.0, 0.0
    every_s = max(every_s, cluster.write_s)  # the writer takes one save at a time
    while now_s < end_s:
        until_s = min(end_s, now_s + rng.expovariate(1.0 / cluster.mtbf_s))
        lived_s, period_s = until_s - now_s, every_s + cluster.stall_s
        # A save that was started is durable only after it was written.
        saved = max(0, math.floor((lived_s - cluster.write_s) / period_s))
        if until_s >= end_s:
            rest_s = lived_s - math.floor(lived_s / period_s) * period_s
            useful_s += math.floor(lived_s / period_s) * every_s + min(rest_s, every_s)
        else:
            useful_s += saved * every_s
        now_s = until_s + cluster.restart_s
    return useful_s / end_s


def goodput(cluster: Cluster, every_s: float, *, days: float = 60.0, repeats: int = 8) -> float:
    return statistics.fmean(simulate(cluster, every_s, days=days, seed=seed) for seed in range(repeats))


def best_interval(cluster: Cluster, **how: float) -> tuple[float, float]:
    """(seconds between saves, goodput) of the best interval, searched on a grid of factors of 1.3."""
    found = []
    every_s = max(1.0, cluster.write_s)
    while every_s < 24 * 3600:
        found.append((goodput(cluster, every_s, **how), every_s))  # type: ignore[arg-type]
        every_s *= 1.3
    best = max(found)
    return best[1], best[0]


def daly_interval(cluster: Cluster) -> float:
    """The interval that Daly's formula gives: sqrt(2 x cost of a save x MTBF), the cost being the stall."""
    return math.sqrt(2 * cluster.stall_s * cluster.mtbf_s)


def rows(clusters: list[Cluster]) -> list[str]:
    lines = [
        "| ranks | MTBF | stall of a save | written in | restart | best interval | Daly | goodput | every 30 min |"
        " heartbeats |",
        "|" + "---|" * 10,
    ]
    for one in clusters:
        every_s, share = best_interval(one)
        half_hour = goodput(one, 1800.0)
        beats = f"{one.ranks * HEARTBEAT_BYTES / 1e6:.1f} MB/s"
        lines.append(
            f"| {one.ranks:,} | {one.mtbf_s / 3600:.1f} h | {one.stall_s:.2f} s | {one.write_s:.0f} s | "
            f"{one.restart_s / 60:.1f} min | {every_s:.0f} s | {daly_interval(one):.0f} s | {100 * share:.1f} % | "
            f"{100 * half_hour:.1f} % | {beats} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,64,512,4096,16384")
    parser.add_argument("--rate", choices=list(RATES), default="llama3")
    parser.add_argument("--params", type=float, default=70e9)
    parser.add_argument("--detect", type=float, default=60.0, help="seconds until a failure or a hang is known")
    parser.add_argument("--store", type=float, default=200e9, help="bytes a second that all nodes can write together")
    options = parser.parse_args()
    first = Cluster(8, RATES[options.rate], params=options.params, detect_s=options.detect, store_rate=options.store)
    clusters = [replace(first, ranks=int(word)) for word in options.ranks.split(",")]
    print("\n".join(rows(clusters)))
    late = replace(clusters[-1], detect_s=1800.0)
    _, share = best_interval(late)
    print(f"\nwith {late.ranks:,} ranks and 30 min until a hang is known: {100 * share:.1f} % at its best interval")


if __name__ == "__main__":
    main()

"""Prints how often the drift test calls a single-server queue saturated: the table in docs/metrics.md."""

from __future__ import annotations

from sim.saturation import Load, saturation
from tests.sim.toy_runs import queue_run

LOADS = (0.5, 0.8, 0.95, 1.0, 1.1, 1.5)
SEEDS = 200

if __name__ == "__main__":
    print("arrivals", *LOADS, sep="\t")
    for n in (500, 1500, 3000, 6000):
        runs = [[saturation(queue_run(rho, n, seed)).load for seed in range(SEEDS)] for rho in LOADS]
        print(n, *(f"{r.count(Load.SATURATED) / SEEDS:.1%}" for r in runs), sep="\t")

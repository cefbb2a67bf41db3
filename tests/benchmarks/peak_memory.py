"""Run the benchmark's trace, make its record and summary, and print this process's peak memory in MiB."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from sim.deployment import simulate
from sim.metrics import summarise
from tests.benchmarks.azure import conversations, deployment


def peak_mib() -> float:
    """Linux keeps the parent's peak in `ru_maxrss` across exec; VmHWM is this program's own."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def main() -> None:
    record = simulate(conversations(), deployment())
    summary = summarise(record)
    print(f"{peak_mib():.1f} {summary.completed} {len(record.steps)}")


if __name__ == "__main__":
    main()

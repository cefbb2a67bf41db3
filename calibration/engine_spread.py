"""How far prices of measured kernels may be off in an engine: `python -m calibration.engine_spread [--write PAGE]`.

Two estimates of one number, the standard deviation of the logarithm of (real step time / sum of measured kernels). The
first has seen no engine: the same products were timed on one kind of GPU by several engines, months apart and on other
machines, and each table's level among the others is such an error. The second has: mean TPOT of real runs on three
machines, each left out in turn, so that the others say how wide its interval would have been.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from calibration.doc_tables import markdown, page_command
from calibration.tables import read_table
from calibration.validate import validate
from costmodel.datasheet import device_facts

TABLES: dict[str, tuple[str, ...]] = {
    "h100": ("trtllm-1.3.0rc20", "vllm-0.14.0", "vllm-0.24.0"),
    "h200": ("trtllm-1.3.0rc20", "vllm-0.14.0", "vllm-0.24.0"),
}
"""Devices whose bfloat16 products several engines timed."""

TOKENS = {"1 to 64": (1, 64), "65 to 512": (65, 512), "513 to 4,096": (513, 4096)}
RUNS = {
    "RTX 4090, vLLM 0.19": ("", "lss_rtx4090_llama31-8b_tp1"),
    "RTX PRO 6000, vLLM 0.19": ("", "lss_rtxpro6000_llama31-8b_tp1"),
    "H200, vLLM 0.10 (mean of its points)": ("inferencex_llama70b_fp8_h200_vllm.csv", None),
}
_SECTION = "engine spread"
_NORMAL_95 = 1.96


def levels(timings: Sequence[Mapping[tuple[int, int, int], float]]) -> list[float]:
    """Median log ratio of each table to the mean of all, over the problems that all have."""
    common = set(timings[0]).intersection(*timings[1:])
    logs = np.log([[table[problem] for problem in sorted(common)] for table in timings])
    return [float(v) for v in np.median(logs - logs.mean(axis=0), axis=1)]


def spread(values: Sequence[float]) -> float:
    """Standard deviation of `values` about their mean, for as many as there are (n − 1)."""
    return float(np.std(values, ddof=1))


def retimed(data: Path) -> list[tuple[str, str, list[float]]]:
    """(device, tokens, level of each table) of products whose weights exceed the L2 cache."""
    found = []
    for device, names in TABLES.items():
        facts = device_facts(device)
        timings: list[dict[tuple[int, int, int], float]] = []
        for name in names:
            several = defaultdict(list)
            for row in read_table(data / f"kernels_gemm_{device}_sxm_{name}.csv").rows:
                n, k = int(row["n"]), int(row["k"])
                if row["dtype"] == "bfloat16" and 2 * n * k > facts.l2_bytes:
                    several[n, k, int(row["m"])].append(float(row["latency_us"]))
            timings.append({problem: float(np.median(v)) for problem, v in several.items()})
        for tokens, (low, high) in TOKENS.items():
            within = [{p: t for p, t in table.items() if low <= p[2] <= high} for table in timings]
            found.append((device, tokens, levels(within)))
    return found


def pooled(groups: Sequence[Sequence[float]]) -> float:
    """One standard deviation for groups that have it in common."""
    squares = sum(spread(g) ** 2 * (len(g) - 1) for g in groups)
    return math.sqrt(squares / sum(len(g) - 1 for g in groups))


def left_out(errors: Mapping[str, float]) -> list[tuple[str, float, float, bool]]:
    """(run, its error, spread by the other runs, whether its 95 % interval would have held the error).

    Prices claim to be right on average, so the spread is about 0 and not about the others' mean.
    """
    found = []
    for run, error in errors.items():
        others = [e for other, e in errors.items() if other != run]
        width = math.sqrt(sum(e * e for e in others) / len(others))
        found.append((run, error, width, abs(error) <= _NORMAL_95 * width))
    return found


def run_errors(yardstick: Path) -> dict[str, float]:
    """Log of twin over real mean TPOT of each machine's runs."""
    errors = {}
    for name, (file, run) in RUNS.items():
        found = validate(None, yardstick / file, run=run)
        ratios = [f.twin_ms / f.real_ms for f in found.counted("tpot") if f.statistic == "mean"]
        errors[name] = float(np.mean(np.log(ratios)))
    return errors


def table(data: Path) -> str:
    """Both estimates as Markdown tables."""
    timed = retimed(data / "kernels")
    rows = [
        [device, tokens, *(f"{v:+.1%}" for v in found), f"{spread(found):.1%}"]
        for device, tokens, found in timed
    ]
    rows.append(["all", "", "", "", "", f"{pooled([found for *_, found in timed]):.1%}"])
    names = next(iter(TABLES.values()))
    first = markdown(["the same products on", "tokens", *names, "spread"], rows)
    errors = run_errors(data / "yardstick")
    rows = [
        [run, f"{error:+.1%}", f"{width:.1%}", "yes" if held else "no"]
        for run, error, width, held in left_out(errors)
    ]
    rows.append(["all", "", f"{math.sqrt(sum(e * e for e in errors.values()) / len(errors)):.1%}", ""])
    second = markdown(
        ["run left out", "mean TPOT, twin / real", "spread by the others", "inside 1.96 of them"], rows
    )
    return f"{first}\n\n{second}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write it into a page if asked to."""
    return page_command(
        "python -m calibration.engine_spread", __doc__, _SECTION, table, "../shared/data", arguments
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Published serving measurements beside the twin's: `python -m experiments.public_results [--write docs/validation.md]`.

`experiments/data/public_results.yaml` holds what others ran and got. Each run is simulated with the shipped profiles
and with nothing fitted to it; the page shows every error, signed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from calibration.doc_tables import markdown, write_between
from calibration.observed import with_engine
from serving.errors import TokenTwinError, UsageError
from sim.deployment import Deployment
from sim.replications import REPLICATIONS, replicate
from sim.workload import WorkloadSpec

FACTS = Path(__file__).parent / "data" / "public_results.yaml"
SECTION = "published results"
_VERSION = re.compile(r"vLLM (\d[.\d]*)")
_MIDDLE, _TAIL = ("mean", "median"), "p99"


@dataclass(frozen=True)
class Published:
    """One run of somebody else: flags of `tokentwin simulate`, and the figures (ms, or per second) that it got."""

    label: str
    source: str
    page: str
    measured: str
    engine: str
    unknown: str
    flags: dict[str, Any]
    figures: dict[str, float]

    def command(self, data: Path) -> str:
        """The deployment and its traffic as a command line; its files are below `data`."""
        words = ["tokentwin", "simulate"]
        for name, value in self.flags.items():
            if name == "dataset_path":
                value = data / value
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else "--no-" + flag[2:])
            else:
                words += [flag, str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Found:
    """A published figure and the twin's, in its unit, with the twin's 95 % interval."""

    run: Published
    name: str
    real: float
    twin: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.twin / self.real - 1

    @property
    def covered(self) -> bool:
        return self.low <= self.real <= self.high


def read(path: Path = FACTS) -> list[Published]:
    """All published runs. Raises `UsageError` for a file that holds something else."""
    try:
        sources = yaml.safe_load(path.read_text(encoding="utf-8"))
        return [
            Published(
                label=run["label"],
                source=source["source"],
                page=source["page"],
                measured=str(source["measured"]),
                engine=source["engine"],
                unknown=source["unknown"],
                flags=_flags(source, run),
                figures={name: float(value) for name, value in run["published"].items()},
            )
            for source in sources
            for run in source["runs"]
        ]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: no list of published results ({error!r})") from None


def _flags(source: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The run's flags over its source's, with the engine's version where anything is priced by it."""
    flags = {**source["flags"], **run["flags"]}
    if (version := _VERSION.match(source["engine"])) is None:
        return flags
    deployment = with_engine(_deployment(flags), version[1])
    return flags if deployment.engine_version is None else {**flags, "engine_version": version[1]}


def _deployment(flags: dict[str, Any]) -> Deployment:
    return Deployment(**{name: value for name, value in flags.items() if name in Deployment.model_fields})


def compare(run: Published, data: Path, *, replications: int = REPLICATIONS) -> list[Found]:
    """The twin's figures beside the published ones; `data` holds the traces. Raises `UsageError` as `simulate` does."""
    deployment, workload = split(run.flags, data)
    replicated = replicate(workload, deployment, replications=replications)
    found = []
    for name, real in run.figures.items():
        interval = replicated.interval(name)
        if interval is None:
            raise UsageError(f"{run.source}, {run.label}: the twin has no figure {name!r}")
        unit = 1.0 if name.endswith("throughput") else 1e3
        ends = (interval.value, interval.low, interval.high)
        found.append(Found(run, name, real, *(end * unit for end in ends)))
    return found


def split(flags: dict[str, Any], data: Path) -> tuple[Deployment, WorkloadSpec]:
    """Flags of `simulate` as the deployment and the workload that they stand for; paths are below `data`."""
    traffic = {name: value for name, value in flags.items() if name not in Deployment.model_fields}
    dataset = {"name": traffic.pop("dataset_name")}
    if "dataset_path" in traffic:
        dataset["path"] = data / traffic.pop("dataset_path")
    for name in [name for name in traffic if name.startswith(dataset["name"])]:
        dataset[name.removeprefix(dataset["name"] + "_")] = traffic.pop(name)
    arrivals = {"request_rate": traffic.pop("request_rate")} if "request_rate" in traffic else {}
    concurrency = traffic.pop("max_concurrency", None)
    tenant = {"dataset": dataset, "arrivals": arrivals, **traffic}
    return _deployment(flags), WorkloadSpec.model_validate(
        {"tenants": [tenant], "max_concurrency": concurrency}
    )


def table(found: Sequence[Found]) -> str:
    """Markdown: medians by GPU, every run, and what is known of each source."""
    return "\n\n".join((_medians(found), _runs(found), _sources(found)))


def kind(name: str) -> str:
    """What a figure tells of: time to the first token, pace of the others, whole requests, or tails."""
    statistic, _, metric = name.partition("_")
    if name.endswith("throughput"):
        return "throughput"
    if statistic not in _MIDDLE:
        return "tails"
    return {"ttft": "TTFT", "e2el": "E2EL"}.get(metric, "TPOT, ITL")


_KINDS = ("TTFT", "TPOT, ITL", "E2EL", "throughput", "tails")


def _medians(found: Sequence[Found]) -> str:
    groups = {gpu: [f for f in found if f.run.flags["gpu"] == gpu] for gpu in sorted(_gpus(found))}
    rows = []
    for name, figures in {**groups, "all": list(found)}.items():
        cells = [_median([f for f in figures if kind(f.name) == each]) for each in _KINDS]
        covered = f"{sum(f.covered for f in figures)} of {len(figures)}"
        runs = len({(f.run.source, f.run.label) for f in figures})
        rows.append([name, str(runs), *cells, covered])
    return markdown(["median absolute error (bias)", "runs", *_KINDS, "in the 95 % interval"], rows)


def _gpus(found: Iterable[Found]) -> set[str]:
    return {f.run.flags["gpu"] for f in found}


def _median(figures: Sequence[Found]) -> str:
    if not figures:
        return "—"
    errors = [f.error for f in figures]
    return f"{np.median(np.abs(errors)):.1%} ({np.median(errors):+.1%})"


def _runs(found: Sequence[Found]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for f in found:
        key = (f.run.source, f.run.label)
        mark = "" if f.covered else " *"
        cell = f"{f.name.replace('_', ' ')} {_number(f.real)} → {_number(f.twin)} ({f.error:+.1%}{mark})"
        rows.setdefault(key, []).append(cell)
    body = [[source, label, "; ".join(cells)] for (source, label), cells in rows.items()]
    return markdown(["source", "run", "published → twin, ms or per second (* outside the interval)"], body)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _sources(found: Sequence[Found]) -> str:
    runs = {f.run.source: f.run for f in found}.values()
    rows = [[f"[{r.source}]({r.page})", r.measured, r.engine, r.unknown] for r in runs]
    return markdown(["source", "measured", "engine", "not known, or not the same"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.public_results", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of traces/")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page to put the tables into")
    parser.add_argument("--only", metavar="TEXT", help="only runs whose source or label has this pattern")
    parser.add_argument("--commands", action="store_true", help="print the runs as commands and stop")
    given = parser.parse_args(arguments)
    try:
        runs = read()
        if given.only is not None:
            runs = [r for r in runs if re.search(given.only, f"{r.source}: {r.label}")]
            if not runs:
                raise UsageError(f"--only {given.only!r} is in no source or label of {FACTS}")
            if given.write is not None:
                raise UsageError("--only leaves runs out of a page; drop it or --write")
        if given.commands:
            sys.stdout.write("".join(f"# {r.source}: {r.label}\n{r.command(given.data)}\n" for r in runs))
            return 0
        text = table([f for run in runs for f in compare(run, given.data)])
        if given.write is None:
            sys.stdout.write(text + "\n")
        else:
            write_between(given.write, SECTION, text)
    except TokenTwinError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

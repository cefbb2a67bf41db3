"""`tt.simulate`: the command line's job from Python, with the same names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.errors import UsageError
from sim.deployment import Deployment
from sim.hull import check_strict
from sim.slo import Goodput
from sim.workload import Workload, WorkloadSpec, read_workload_file
from tokentwin.flag_tables import DEPLOYMENT, PROMISES, RUN, TRAFFIC
from tokentwin.flags import find
from tokentwin.job import make_job, run_job
from tokentwin.progress import progress_bar
from tokentwin.run import Run

KNOWN = {
    flag.name: flag
    for table in (DEPLOYMENT, TRAFFIC, PROMISES, RUN)
    for flag in table
    if flag.name not in ("config", "print_config", "fail_on_slo", "disable_tqdm")
}


def simulate(
    workload: Workload | WorkloadSpec | str | Path | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    deployment: Deployment | None = None,
    dataset_name: str | None = None,
    dataset_path: str | Path | None = None,
    request_rate: float | None = None,
    num_prompts: int | None = None,
    goodput: Goodput | Mapping[str, float] | Sequence[str] | str | None = None,
    slo: Sequence[str] | str | None = None,
    seed: int = 0,
    label: str | None = None,
    progress: bool = False,
    **flags: Any,
) -> Run:
    """Run a workload on a deployment and return what happened.

    Every flag of `tokentwin simulate` about deployment, traffic and promises is a keyword with underscores for dashes
    (`max_num_seqs=256`, `isl=1024`). `workload` stands in for the traffic flags: a workload, its spec, or the path of
    a YAML workload file. `deployment` is a base that deployment flags change. Limits are in ms as on the command line.

    `replications=8` adds 95 % intervals (`run.certainty`); there are none by default, to keep loops fast.

    >>> run = simulate(model="llama-3.1-8b", gpu="h200", dataset_name="random", request_rate=4, num_prompts=20)
    >>> run.summary.completed
    20

    Raises `UsageError` for names, values and combinations that cannot be. An interrupt returns the partial run.
    """
    given: dict[str, Any] = {
        "model": model,
        "gpu": gpu,
        "dataset_name": dataset_name,
        "dataset_path": dataset_path,
        "request_rate": request_rate,
        "num_prompts": num_prompts,
        "goodput": goodput,
        "slo": slo,
        "seed": seed,
    }
    for name, value in flags.items():
        flag = find(name, KNOWN, "simulate()")
        if given.get(flag.name) is not None:
            raise UsageError(f"simulate(): {flag.name} is given twice; keep one")
        given[flag.name] = value
    if isinstance(workload, str | Path):
        workload = read_workload_file(workload)
    given.setdefault("replications", 1)
    job = make_job(given, deployment=deployment, workload=workload)
    with progress_bar(silent=not progress or not sys.stderr.isatty()) as bar:
        run = run_job(job, label=label, progress=bar)
    if job.strict:
        check_strict(run.certainty.extrapolations)
    return run

"""`tokentwin simulate`: a workload on a deployment; a table and a verdict on the terminal, files where asked."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.console import WIDTH, print_run
from experiments.observed import any_fired
from experiments.utilisation import work_of_steps
from sim.fleet.build import is_fleet, num_replicas
from sim.hull import check_strict
from sim.record import Floats
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import DEPLOYMENT, OBSERVE, OUTPUT, PROMISES, RUN, SIMULATE, TRAFFIC
from tokentwin.flags import takes
from tokentwin.job import Job, make_job, run_job
from tokentwin.live import of_world
from tokentwin.observe import Observers
from tokentwin.outputs import Outputs
from tokentwin.progress import progress_bar
from tokentwin.run import Run

LOST, SLO_MISSED, ALERT_FIRED, INTERRUPTED = 1, 3, 3, 130


@takes(DEPLOYMENT, TRAFFIC, PROMISES, RUN, OUTPUT, OBSERVE)
def simulate(**flags: Any) -> int:
    """Run a workload on a deployment in simulated time, print its latencies and say whether it keeps its promises.

    Example: tokentwin simulate --model llama-3.1-8b --gpu h200 --dataset-name random --request-rate 20
    --goodput ttft:500 tpot:50 --slo p95_ttft:500 p95_tpot:50 -o runs/first
    """
    given = with_config(flags, SIMULATE)
    outputs = Outputs.of(given)
    job = make_job(given)
    if given.get("print_config"):
        return print_config(given, job.built)
    observers = Observers.of(given)
    outputs.check()
    with (
        progress_bar(silent=bool(given.get("disable_tqdm"))) as bar,
        observers.watching(job.built.model.name, of_world, work_so_far(job)) as watch,
    ):
        run = run_job(job, label=given.get("label"), progress=bar, watch=watch)
    print_run(run.record, run.summary, run.verdict, metrics=outputs.metrics, certainty=run.certainty)
    say_files([*outputs.write(run), *observers.write(run.record)])
    if job.strict:
        check_strict(run.certainty.extrapolations)
    code = exit_code(run, job, fail_on_slo=bool(given.get("fail_on_slo")))
    return ALERT_FIRED if not code and given.get("fail_on_alert") and any_fired(run.record) else code


def work_so_far(job: Job) -> Callable[[Mapping[str, Floats]], tuple[float, float]] | None:
    """(FLOPs, bytes) of steps on one device, from their columns; None of a fleet, whose devices may differ and change."""
    if is_fleet(job.built.deployment):
        return None
    replicas = num_replicas(job.built.deployment)

    def work(steps: Mapping[str, Floats]) -> tuple[float, float]:
        flops, moved = work_of_steps(steps, job.built)
        return float(flops.sum()) / replicas, float(moved.sum()) / replicas

    return work


def exit_code(run: Run, job: Job, *, fail_on_slo: bool) -> int:
    """130 interrupted, 1 a request was lost (both said on stderr), 3 an SLO missed with --fail-on-slo, otherwise 0."""
    if run.record.interrupted:
        sys.stderr.write(
            f"error: interrupted; {run.num_lost} requests had not ended, the results are partial\n"
        )
        return INTERRUPTED
    if run.certainty.interrupted:
        sys.stderr.write("error: interrupted; the results are whole but for their intervals\n")
        return INTERRUPTED
    if run.num_lost and job.until_s == float("inf"):
        sys.stderr.write(f"error: {run.num_lost} of {run.num_requests} requests never ended\n")
        return LOST
    if fail_on_slo and not run.verdict.meets_slos:
        return SLO_MISSED
    return 0


def say_files(paths: list[Path]) -> None:
    """Print where files were written."""
    for folder in dict.fromkeys(path.parent for path in paths):
        names = ", ".join(path.name for path in paths if path.parent == folder)
        lines = textwrap.wrap(
            names, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        sys.stdout.write("\n".join([f"Wrote to {folder}:", *lines]) + "\n")

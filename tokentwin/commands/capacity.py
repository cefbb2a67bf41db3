"""`tokentwin capacity`: the highest load that a deployment sustains under an SLO."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.capacity import Capacity, find_capacity
from experiments.capacity_lengths import FULL, MOST_SHORTER, SHORT
from experiments.capacity_report import capacity_json, capacity_lines
from experiments.capacity_traffic import Steady, Traffic, make_traffic
from experiments.capacity_trial import Promises
from serving.errors import InfeasibleError, UsageError
from sim.deployment import Built, Deployment, build
from sim.fleet.build import is_dynamic, num_replicas
from sim.hull import Extrapolation, after_run, before_run, check_strict
from sim.slo import parse_slo
from sim.workload import WorkloadSpec
from sim.workload.files import SAMPLES
from tokentwin.config_file import print_config, with_config
from tokentwin.flag_tables import DEPLOYMENT, JSON, OUTPUT, PROMISES, RUN, SIMULATE, TRAFFIC
from tokentwin.flags import Flag, at_least, takes
from tokentwin.job import check_routing, make_deployment, make_goodput, make_spec
from tokentwin.job import words as items
from tokentwin.outputs import check_folder
from tokentwin.provenance import ARGV, VERSION, git_commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokentwin.run import Run

SLO_MISSED = 3
SEARCH = (
    Flag("slo_attainment", float, "Share of requests that must keep their --goodput limits.", "Promises", (), "0.95"),
    Flag("workload_var", Literal["request_rate", "rate_scale", "max_concurrency"], "What is turned up: the rate "
     "(request_rate), a trace's speed (rate_scale) or the users of a closed loop (max_concurrency).", "Run", (),
     "rate_scale for a trace, else request_rate"),
    Flag("target_request_rate", float, "Also say whether this rate is sustained, or how many deployments it takes.",
     "Run"),
    Flag("target_concurrency", float, "The same for --workload-var max_concurrency.", "Run"),
    Flag("jobs", int, "Processes that share the runs of the interval.", "Run", (), "all cores"),
)  # fmt: skip
_HELP = {
    "num_prompts": f"Requests of a run of full length ({FULL} by default), at least {SHORT} and more where a request "
    f"takes long; of a trace, its first requests. Where an answer is k requests to the engine (--beam-width, --best-of), "
    f"both are 1/k of that, but no less than 1/{MOST_SHORTER}.",
    "request_rate": "Where the search starts; does not change the answer. A trace with it is sent at a steady rate.",
    "output_dir": "Folder for capacity.json and everything about the run at capacity, report.html among it.",
    "fail_on_slo": "Exit with code 3 when no load, or not the target, is sustained.",
}


def _kept(table: tuple[Flag, ...], *names: str) -> tuple[Flag, ...]:
    return tuple(replace(f, help=_HELP.get(f.name, f.help)) for f in table if not names or f.name in names)


TABLES = (
    DEPLOYMENT,
    _kept(TRAFFIC),
    _kept(PROMISES),
    SEARCH,
    _kept(RUN, "seed", "replications", "strict", "config", "print_config", "disable_tqdm"),
    _kept(OUTPUT, "output_dir"),
    (JSON,),
)
NOT_AGAIN = (
    *("num_prompts", "request_rate", "rate_scale", "replications", "seed", "config", "print_config"),
    *("output_dir", "fail_on_slo", "strict", "disable_tqdm"),
)
KNOWN = {flag.name: flag for table in TABLES for flag in table}


@dataclass(frozen=True)
class CapacityAnswer:
    """What `tokentwin capacity` found, and for which deployment."""

    found: Capacity
    built: Built
    traffic: Traffic
    promises: Promises
    target: float | None
    seed: int
    extrapolations: tuple[Extrapolation, ...] = ()

    def json(self) -> dict[str, Any]:
        """The answer as strict JSON values."""
        known = {
            "seed": self.seed,
            "argv": list(ARGV.get()),
            "version": VERSION,
            "git_commit": git_commit(),
        }
        return capacity_json(
            self.found,
            self.built,
            target=self.target,
            extrapolations=self.extrapolations,
            provenance=known,
        )


@takes(*TABLES)
def capacity(**flags: Any) -> int:
    """Find the highest request rate (or concurrency) that a deployment sustains under an SLO.

    Example: tokentwin capacity --model llama-3.1-8b --gpu h200 --dataset-name random --slo chat
    """
    given = with_config(flags, KNOWN)
    if given.get("print_config"):
        make_spec(given)
        return print_config(given, build(make_deployment(given)), KNOWN)
    folder = given.get("output_dir")
    if folder is not None:
        check_folder(folder)
    with _status(silent=bool(given.get("disable_tqdm")) or bool(given.get("json"))) as told:
        answer = answer_capacity(given, told=told, progress=told)
    if given.get("json"):
        sys.stdout.write(json.dumps(answer.json(), indent=1, allow_nan=False) + "\n")
    else:
        lines = capacity_lines(
            answer.found,
            answer.built,
            target=answer.target,
            extrapolations=answer.extrapolations,
            again=_again(given, answer),
        )
        sys.stdout.write("\n".join(lines) + "\n")
    if folder is not None:
        names = ", ".join(path.name for path in _write(answer, folder))
        if not given.get("json"):
            sys.stdout.write(f"Wrote to {folder}: {names}\n")
    if given.get("strict"):
        check_strict(answer.extrapolations)
    missed = answer.found.load is None or (answer.target is not None and answer.target > answer.found.load)
    return SLO_MISSED if given.get("fail_on_slo") and missed else 0


def answer_capacity(
    flags: Mapping[str, Any],
    *,
    deployment: Deployment | None = None,
    workload: WorkloadSpec | None = None,
    told: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> CapacityAnswer:
    """The capacity that flags by name ask for; `deployment` is a base for them, `workload` stands in for traffic flags.

    Raises UsageError for what cannot be; `InfeasibleError` where the model does not fit.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    promises = Promises(
        parse_slo(items(given.get("slo"))),
        make_goodput(given.get("goodput")),
        float(given.get("slo_attainment", 0.95)),
    )
    variable = given.get("workload_var")
    target = _target(given, variable)
    try:
        planned = make_deployment(given, deployment)
        check_routing(planned, given)
        built = build(planned)
    except InfeasibleError as error:
        raise InfeasibleError(f"infeasible at any load: {error}") from None
    if is_dynamic(built.deployment):
        raise UsageError(
            "--autoscaler and --failures have no meaning here: each load is tested in a run of seconds to minutes; set "
            "the number of replicas with --data-parallel-size or pools"
        )
    if given.get("strict"):
        check_strict(before_run(built))
    seed = int(given.get("seed", 0))
    traffic = make_traffic(
        workload if workload is not None else make_spec({**given, "num_prompts": None}),
        seed=seed,
        variable=variable,
    )
    if traffic.whole and workload is None and "num_prompts" in given:
        traffic = make_traffic(make_spec(given), seed=seed, variable=variable)
    for name in ("rate_scale", "duration"):
        if name in given and not traffic.whole:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect on a search over {traffic.variable}; leave it out"
            )
    start = given.get("request_rate")
    if start is not None and not math.isfinite(start):
        raise UsageError(
            "--request-rate is where the search starts and must be finite, got inf; leave it out"
        )
    sample = traffic.workload(1.0, 16 if not traffic.whole else 0)
    promises.check(sample)
    if "slo_attainment" in given and not promises.limited(sample.tenants):
        raise UsageError("--slo-attainment has no effect without --goodput; add limits such as ttft:500")
    if target is not None and traffic.variable == "rate_scale":
        target = target / traffic.requests_per_s(1.0)
    found = find_capacity(
        built,
        traffic,
        promises,
        start=start if traffic.variable == "request_rate" else None,
        full=at_least(given, "num_prompts"),
        replications=at_least(given, "replications", default=8),
        seed=seed,
        jobs=at_least(given, "jobs"),
        told=told,
        progress=progress,
    )
    extrapolations = before_run(built) if found.record is None else after_run(built, found.record)
    return CapacityAnswer(found, built, traffic, promises, target, seed, extrapolations)


def _target(given: Mapping[str, Any], variable: str | None) -> float | None:
    closed = variable == "max_concurrency"
    mine, other = "target_concurrency", "target_request_rate"
    if not closed:
        mine, other = other, mine
    if other in given:
        need = "needs" if not closed else "has no effect with"
        raise UsageError(f"--{other.replace('_', '-')} {need} --workload-var max_concurrency")
    target = given.get(mine)
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"--{mine.replace('_', '-')} must be a positive, finite number, got {target:g}")
    return None if target is None else float(target)


def _again(given: Mapping[str, Any], answer: CapacityAnswer) -> str:
    """The command that simulates the run at capacity."""
    found = answer.found
    if found.load is None or found.at is None:
        return ""
    load = f"{found.load:.4g}"
    count = ["--num-prompts", str(found.at.num_requests)]
    if found.variable == "max_concurrency":
        how = ["--max-concurrency", load, *count]
    elif given.get("dataset_name") in SAMPLES or len(answer.traffic.spec.tenants) > 1:
        base = answer.traffic.total_rate if isinstance(answer.traffic, Steady) else 1.0
        how = ["--rate-scale", f"{found.load / base:.6g}"]
    elif found.variable == "rate_scale":
        how = ["--rate-scale", load, *(count if "num_prompts" in given else [])]
    else:
        how = ["--request-rate", load, *count]
    parts = ["tokentwin", "simulate"]
    for name, value in given.items():
        flag = SIMULATE.get(name)
        if flag is None or name in NOT_AGAIN:
            continue
        if isinstance(value, bool):
            parts.append(flag.option if value else flag.option.replace("--", "--no-", 1))
        else:
            text = json.dumps(value) if flag.structured and not isinstance(value, str) else str(value)
            parts += [flag.option, *(map(str, value) if flag.several else [text])]
    return shlex.join([*parts, *how, "--seed", str(answer.seed)])


def _write(answer: CapacityAnswer, folder: Path) -> list[Path]:
    from experiments.results import writable

    path = folder / "capacity.json"
    with writable(path):
        path.write_text(json.dumps(answer.json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    run = run_at_capacity(answer)
    return [path] if run is None else [path, *run.save(folder)]


def run_at_capacity(answer: CapacityAnswer) -> Run | None:
    """The run at the load that was found, None where no load is sustained."""
    from sim.certainty import Certainty
    from sim.metrics import summarise
    from sim.verdict import verdict
    from tokentwin.run import Run

    record = answer.found.record
    if record is None:
        return None
    d = answer.built.deployment
    meta = {
        "argv": list(ARGV.get()),
        "version": VERSION,
        "git_commit": git_commit(),
        "seed": answer.seed,
        "model_id": answer.built.model.name,
        "gpu": answer.built.profile.name,
        "tensor_parallel_size": d.tensor_parallel_size,
        "pipeline_parallel_size": d.pipeline_parallel_size,
        "data_parallel_size": num_replicas(d),
    }
    record = replace(record, meta={**record.meta, **meta})
    summary = summarise(record, goodput=answer.promises.goodput, slos=answer.promises.slos)
    certainty = Certainty(extrapolations=answer.extrapolations)
    return Run(record, summary, verdict(record, summary), answer.built, len(record.requests), certainty)


@contextmanager
def _status(*, silent: bool) -> Iterator[Callable[[str], None] | None]:
    """A line on standard error that says what was tested last, or None where nobody would see it."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield None
        return
    with console.status("Testing the server with one request at a time") as status:
        yield lambda words: status.update(f"Searching; {words}")
